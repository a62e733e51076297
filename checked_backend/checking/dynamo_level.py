"""Find the faulty operator if Dynamo's graph is wrong already when it runs in eager.

Eager's operator calls are compared with those of Dynamo's graph, in order. Fake kernels tell Dynamo the sizes of
results. An operator whose fake kernel disagrees with its real one is at fault whatever comes after it.
"""

from __future__ import annotations

import linecache
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any, NamedTuple

import torch

from checked_backend._torch.dynamo import dynamo_reset
from checked_backend._torch.fake_tensors import FakeTensorMode, fake_errors_unlogged, fake_refusals
from checked_backend._torch.operators import OpOverload
from checked_backend._torch.pytree import tree_leaves, tree_map
from checked_backend.checking.program import Program
from checked_backend.checking.program_runner import Traced
from checked_backend.diagnose.repro.repro import write_source_repro
from checked_backend.findings import EvidenceKey, Finding
from checked_backend.findings.paths import shown_path
from checked_backend.graphs.operators import Operator, OperatorKind
from checked_backend.modes.base import OperatorMode
from checked_backend.numerics.fingerprint import fingerprint
from checked_backend.options import CheckOptions
from checked_backend.report.file_names import this_moment
from checked_backend.scripts.values import Untranslatable

_HERE = str(Path(__file__).parent.parent) + os.sep
_TORCH = str(Path(torch.__file__).parent) + os.sep


class _Cause(NamedTuple):
    """The operator at fault, the user's line that called it, and how it is at fault, in words."""

    op: str
    source: str | None
    why: str


@dataclass(frozen=True, slots=True)
class _Called:
    """One operator call; ``reshapes``: it changed a tensor's shape in place."""

    op: str
    given: tuple[str, ...]
    made: tuple[Any, ...]
    source: str | None
    disagreement: str | None
    reshapes: bool

    def __str__(self) -> str:
        return f"{self.op}({', '.join(self.given)})"

    @property
    def tensors(self) -> list[str]:
        """The tensors among what it was given."""
        return [given for given in self.given if re.match(r"[a-z0-9_]+\[", given)]


def with_dynamo_cause(
    findings: Sequence[Finding], program: Program, options: CheckOptions, dynamic: bool | None
) -> list[Finding]:
    """Add the operator, the user's line, a script and a workaround to the findings that Dynamo is at fault for."""
    dynamos = [f for f in findings if f.kind.fails and f.stage == "eager" and f.op is None]
    if not dynamos:
        return list(findings)
    evidence: dict[str, str] = {}
    op, source, repro, confirmed = None, None, None, True
    try:
        cause = _find_cause(program, dynamic=dynamic)
    except Exception as error:  # the verdict stands without it
        evidence[EvidenceKey.LOCALIZATION] = f"not: {type(error).__name__}: {error}".splitlines()[0]
    else:
        if cause is not None:
            op, source, evidence[EvidenceKey.AT_OPERATOR] = cause
    try:
        written = write_source_repro(
            program.function,
            program.calls[0].args,
            program.calls[0].kwargs,
            options.report_dir,
            name=f"{(op or 'dynamo').removeprefix('aten.')}-{this_moment()}",
            title=f"{dynamos[0].kind}: {dynamos[0].message}",
            source=source,
            dynamic=dynamic,
        )
    except (Untranslatable, OSError) as error:
        evidence[EvidenceKey.REPRO] = f"none: {error}"
    else:
        repro, confirmed = str(written.path), written.confirmed
        if written.doubt:
            evidence[EvidenceKey.REPRO] = written.doubt
    workaround = None
    if (found := re.search(r" in (\w+)(:|$)", source or "")) is not None:
        # Dynamo cannot trace a whole function wrongly if it does not trace it
        workaround = f"{found[1]} = torch.compiler.disable({found[1]})  # the function at {source}"
        evidence[EvidenceKey.WORKAROUND] = "not tried: it is a change of the program"

    def caused(finding: Finding) -> Finding:
        return replace(
            finding,
            op=op,
            source=source or finding.source,
            workaround=workaround,
            workaround_confirmed=False,
            repro=repro,
            repro_confirmed=confirmed,
            searched=True,
            evidence={**finding.evidence, **evidence},
        )

    return [caused(finding) if finding in dynamos else finding for finding in findings]


def _find_cause(program: Program, *, dynamic: bool | None) -> _Cause | None:
    """Find the first operator that Dynamo's graph calls otherwise than eager, or whose fake kernel is wrong."""
    eager = _Watch(look_at_fakes=True)
    program.run(modes=lambda _: (eager,))
    for call in eager.calls:
        if call.disagreement is not None:
            return _Cause(call.op, call.source, call.disagreement)
    compiled = _Watch(look_at_fakes=False)
    dynamo_reset()
    try:
        outcome = program.run(Traced(dynamic).under(compiled))
    finally:
        dynamo_reset()
    refused = None if outcome.error is None else _refused(eager.calls, outcome.error)
    return refused or _first_difference(eager.calls, compiled.calls)


def _first_difference(eager: Sequence[_Called], compiled: Sequence[_Called]) -> _Cause | None:
    mine, theirs = ([(call.op, call.given, call.made) for call in calls] for calls in (eager, compiled))
    matcher = SequenceMatcher(None, mine, theirs, autojunk=False)
    different = [step for step in matcher.get_opcodes() if step[0] != "equal"]
    # calls that are only in eager may stand between two graphs
    for wanted in (("replace",), ("delete", "insert")):
        for tag, start, _, other, _ in different:
            if tag in wanted and start < len(eager):
                call = eager[start]
                found = compiled[other] if tag != "delete" and other < len(compiled) else None
                instead = "leaves it out" if found is None else f"calls {found} there"
                why = f"eager calls {call}; Dynamo's graph {instead}"
                return _cause(eager, start, why, stale=found is not None and found.tensors == call.tensors)
    return None


def _refused(eager: Sequence[_Called], error: Exception) -> _Cause | None:
    """The cause if Dynamo raised while it traced: the call of that line, or an earlier call that made it go wrong."""
    _, _, trace = str(error).partition("from user code:")
    frames = re.findall(r'File "([^"\n]+)", line (\d+), in (\w+)', trace)
    if not frames:
        return None
    file, line, function = frames[-1]
    place = f"{shown_path(file)}:{line} in {function}"
    there = [at for at, call in enumerate(eager) if (call.source or "").startswith(place)]
    if not there:
        return None
    name = re.search(r"call_(?:function|method) (?:<[^>]*?(\w+)[^>\w]*>|(\w+))", str(error))
    wanted = (name[1] or name[2]) if name else None
    at = next((at for at in there if eager[at].op.split(".")[1].strip("_") == wanted), there[-1])
    return _cause(eager, at, f"Dynamo cannot trace {eager[at].op}: {type(error).__name__}: {error}".splitlines()[0])


def _cause(eager: Sequence[_Called], at: int, why: str, *, stale: bool = True) -> _Cause:
    """The call, or if Dynamo may still have sizes from before it, the last call that changed a shape in place."""
    for call in reversed(eager[:at] if stale else ()):
        if call.reshapes:
            return _Cause(call.op, call.source, f"it gives a tensor another shape in place; later {why}")
    return _Cause(eager[at].op, eager[at].source, why)


class _Watch(OperatorMode):
    """Notes every operator call."""

    def __init__(self, *, look_at_fakes: bool) -> None:
        super().__init__()
        self.calls: list[_Called] = []
        self._look_at_fakes = look_at_fakes

    def run(self, func: OpOverload, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = tuple(map(_described, tree_leaves((args, kwargs))))
        fakes = _fakes(args, kwargs) if self._look_at_fakes else None
        in_place = torch.Tag.inplace_view in func.tags
        shape = args[0].shape if in_place else None
        result = func(*args, **kwargs)
        leaves = tree_leaves(result)
        made: list[Any] = [*map(_described, leaves)]
        if operator.kind is not OperatorKind.UNINITIALISED:
            made += [fingerprint(leaf) if type(leaf) is torch.Tensor else None for leaf in leaves]
        told = None if fakes is None else _disagreement(func, *fakes, leaves)
        reshapes = in_place and args[0].shape != shape
        self.calls.append(_Called(str(func), given, tuple(made), _users_line(), told, reshapes))
        return result


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return repr(value)


def _fakes(args: Any, kwargs: Any) -> tuple[FakeTensorMode, Any, Any] | None:
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def fake(value: Any) -> Any:
        return mode.from_tensor(value.detach(), static_shapes=True) if isinstance(value, torch.Tensor) else value

    try:
        return (mode, *tree_map(fake, (args, kwargs)))
    except Exception:  # there are no fake tensors for these
        return None


def _disagreement(func: OpOverload, mode: FakeTensorMode, args: Any, kwargs: Any, real: Sequence[Any]) -> str | None:
    """How an operator's fake kernel differs from the real one; None if it does not."""
    try:
        with mode, fake_errors_unlogged():
            fakes = tree_leaves(func(*args, **kwargs))
    except fake_refusals():  # it depends on data
        return None
    except Exception as error:
        return f"its fake kernel raises {type(error).__name__}: {error}".splitlines()[0]
    for fake, value in zip(fakes, real, strict=False):
        if isinstance(fake, torch.Tensor) and isinstance(value, torch.Tensor) and _described(fake) != _described(value):
            return f"its fake kernel makes {_described(fake)} where the real one makes {_described(value)}"
    return None


def _users_line() -> str | None:
    frame = sys._getframe(1)
    while frame is not None and frame.f_back is not None:
        file = frame.f_code.co_filename
        if not file.startswith((_HERE, _TORCH, "<")):
            code = linecache.getline(file, frame.f_lineno).strip()
            place = f"{shown_path(file)}:{frame.f_lineno} in {frame.f_code.co_name}"
            return f"{place}: {code}" if code else place
        frame = frame.f_back
    return None
