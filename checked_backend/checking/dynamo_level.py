"""Find the faulty operator if Dynamo's graph is wrong already when it runs in eager.

Eager's operator calls are compared with those of Dynamo's graph, in order. Fake kernels tell Dynamo the sizes of
results. An operator whose fake kernel disagrees with its real one is at fault whatever comes after it.
"""

from __future__ import annotations

import linecache
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import fx

from checked_backend._torch.dynamo import dynamo_reset
from checked_backend._torch.fake_tensors import FakeTensorMode, fake_errors_unlogged, fake_refusals
from checked_backend._torch.operators import OpOverload
from checked_backend._torch.pytree import tree_leaves, tree_map
from checked_backend.checking.program import Program
from checked_backend.diagnose.repro import Untranslatable, write_source_repro
from checked_backend.findings import EvidenceKey, Finding
from checked_backend.graphs.operators import Operator, OperatorKind
from checked_backend.modes.base import OperatorMode
from checked_backend.numerics.fingerprint import fingerprint
from checked_backend.options import CheckOptions
from checked_backend.regions.compile import eager_graph
from checked_backend.report.file_names import this_moment

__all__ = ["DynamoCause", "find_cause_in_dynamo", "with_dynamo_cause"]

_HERE = str(Path(__file__).parent.parent) + os.sep
_TORCH = str(Path(torch.__file__).parent) + os.sep


@dataclass(frozen=True, slots=True)
class DynamoCause:
    """The operator at fault.

    Attributes:
        op: The operator.
        source: The user's line that called it.
        why: How the operator is at fault, in words.
    """

    op: str
    source: str | None
    why: str


@dataclass(frozen=True, slots=True)
class _Called:
    """One operator call: its arguments, results and source line, and whether it changed a tensor's shape in place."""

    op: str
    key: tuple[Any, ...]
    source: str | None
    disagreement: str | None
    reshapes: bool


def with_dynamo_cause(
    findings: Sequence[Finding], program: Program, options: CheckOptions, dynamic: bool | None
) -> list[Finding]:
    """Add to the findings that Dynamo is at fault for: the operator, the user's line, a script, a workaround.

    Args:
        findings: The findings of a check; those whose stage is ``eager`` are Dynamo's.
        options: Options, which name the folder of the script.
        dynamic: As for ``torch.compile``.
    """
    if not any(_is_dynamos(finding) for finding in findings):
        return list(findings)
    evidence: dict[str, str] = {}
    confirmed = True
    cause, repro = None, None
    try:
        cause = find_cause_in_dynamo(program, dynamic=dynamic)
    except Exception as error:  # the verdict stands without it
        evidence[EvidenceKey.LOCALIZATION] = f"not: {type(error).__name__}: {error}".splitlines()[0]
    first = next(finding for finding in findings if _is_dynamos(finding))
    op, source = (None, None) if cause is None else (cause.op, cause.source)
    try:
        written = write_source_repro(
            program.function,
            program.args,
            program.kwargs,
            options.report_dir,
            name=f"{(op or 'dynamo').removeprefix('aten.')}-{this_moment()}",
            title=f"{first.kind}: {first.message}",
            source=source,
            dynamic=dynamic,
        )
    except (Untranslatable, OSError) as error:
        evidence[EvidenceKey.REPRO] = f"none: {error}"
    else:
        repro = str(written.path)
        confirmed = written.confirmed
        if not confirmed:
            last = (written.output.strip().splitlines() or ["nothing"])[-1]
            evidence[EvidenceKey.REPRO] = f"the script does not show it in a fresh process; it said: {last}"
    if cause is not None:
        evidence[EvidenceKey.AT_OPERATOR] = cause.why
    return [
        _told(finding, cause, repro, evidence, confirmed) if _is_dynamos(finding) else finding for finding in findings
    ]


def _is_dynamos(finding: Finding) -> bool:
    return finding.kind.fails and finding.stage == "eager" and finding.op is None


def _told(
    finding: Finding, cause: DynamoCause | None, repro: str | None, evidence: dict[str, str], confirmed: bool
) -> Finding:
    op, source = (None, None) if cause is None else (cause.op, cause.source)
    workaround = _left_to_eager(source)
    if workaround is not None:
        evidence = {**evidence, EvidenceKey.WORKAROUND: "not tried: it is a change of the program"}
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


def _left_to_eager(source: str | None) -> str | None:
    """A workaround that leaves a whole function out: Dynamo cannot trace it wrongly if it does not trace it."""
    found = None if source is None else re.search(r" in (\w+)(:|$)", source)
    if found is None:
        return None
    name = found[1]
    return f"{name} = torch.compiler.disable({name})  # the function at {source}"


def find_cause_in_dynamo(program: Program, *, dynamic: bool | None) -> DynamoCause | None:
    """Find the first operator that Dynamo's graph calls otherwise than eager, or whose fake kernel is wrong.

    Args:
        program: The program; it is run in eager, and as Dynamo's graph.
        dynamic: As for ``torch.compile``.

    Returns:
        The operator; None if all calls are the same.
    """
    eager = _Watch(look_at_fakes=True)
    program.run(modes=[lambda: eager])
    for call in eager.calls:
        if call.disagreement is not None:
            return DynamoCause(call.op, call.source, call.disagreement)
    compiled = _Watch(look_at_fakes=False)
    dynamo_reset()
    try:
        outcome = program.run(partial(torch.compile, backend=partial(_watched, watch=compiled), dynamic=dynamic))
    finally:
        dynamo_reset()
    refused = None if outcome.error is None else _refused(eager.calls, outcome.error)
    return refused or _first_difference(eager.calls, compiled.calls)


def _watched(gm: fx.GraphModule, _example_inputs: Sequence[Any], *, watch: _Watch) -> Callable[..., Any]:
    traced = eager_graph(gm).forward

    def run(*args: Any) -> Any:
        with watch:
            return traced(*args)

    return run


def _first_difference(eager: Sequence[_Called], compiled: Sequence[_Called]) -> DynamoCause | None:
    matcher = SequenceMatcher(None, [call.key for call in eager], [call.key for call in compiled], autojunk=False)
    different = [step for step in matcher.get_opcodes() if step[0] != "equal"]
    # calls that are only in eager may stand between two graphs
    for wanted in (("replace",), ("delete", "insert")):
        for tag, start, _, other, _ in different:
            if tag in wanted and start < len(eager):
                call = eager[start]
                found = compiled[other] if tag != "delete" and other < len(compiled) else None
                instead = "leaves it out" if found is None else f"calls {found.op}{_shown(found.key)} there"
                why = f"eager calls {call.op}{_shown(call.key)}; Dynamo's graph {instead}"
                same_tensors = found is not None and _tensors(found.key) == _tensors(call.key)
                stale = _reshaped_before(eager[:start]) if same_tensors else None
                return DynamoCause(call.op, call.source, why) if stale is None else _stale(stale, why)
    return None


def _refused(eager: Sequence[_Called], error: Exception) -> DynamoCause | None:
    """The cause if Dynamo raised while it traced: the call of that line, or an earlier call that made it go wrong."""
    _, _, trace = str(error).partition("from user code:")
    frames = re.findall(r'File "([^"\n]+)", line (\d+), in (\w+)', trace)
    if not frames:
        return None
    file, line, function = frames[-1]
    place = f"{os.path.basename(file)}:{line} in {function}"
    there = [at for at, call in enumerate(eager) if (call.source or "").startswith(place)]
    if not there:
        return None
    name = re.search(r"call_(?:function|method) (?:<[^>]*?(\w+)[^>\w]*>|(\w+))", str(error))
    wanted = (name[1] or name[2]) if name else None
    at = next((at for at in there if eager[at].op.split(".")[1].strip("_") == wanted), there[-1])
    why = f"Dynamo cannot trace {eager[at].op}: {type(error).__name__}: {error}".splitlines()[0]
    stale = _reshaped_before(eager[:at])
    return DynamoCause(eager[at].op, eager[at].source, why) if stale is None else _stale(stale, why)


def _reshaped_before(calls: Sequence[_Called]) -> _Called | None:
    return next((call for call in reversed(calls) if call.reshapes), None)


def _stale(call: _Called, why: str) -> DynamoCause:
    """The cause if Dynamo still has sizes from before a call that changed a tensor's shape in place."""
    return DynamoCause(call.op, call.source, f"it gives a tensor another shape in place; later {why}")


def _tensors(key: tuple[Any, ...]) -> list[str]:
    return [given for given in key[1] if re.match(r"[a-z0-9_]+\[", given)]


def _shown(key: tuple[Any, ...]) -> str:
    return f"({', '.join(map(str, key[1]))})"


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
        made = tuple(map(_described, leaves))
        marks = () if operator.kind is OperatorKind.UNINITIALISED else tuple(map(_mark, leaves))
        told = None if fakes is None else _disagreement(func, *fakes, leaves)
        reshapes = in_place and args[0].shape != shape
        self.calls.append(_Called(str(func), (str(func), given, made, marks), _users_line(), told, reshapes))
        return result


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return repr(value)


def _mark(value: Any) -> int | None:
    return fingerprint(value) if type(value) is torch.Tensor else None


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
            place = f"{os.path.basename(file)}:{frame.f_lineno} in {frame.f_code.co_name}"
            return f"{place}: {code}" if code else place
        frame = frame.f_back
    return None
