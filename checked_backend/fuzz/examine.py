"""Check programs with `check`: several in one compile first, then each alone that may be wrong.

Programs share a compile only to save time. Where findings say which of the programs are wrong, each of those has a
compile of its own, so that nothing but itself can be the reason; where they do not, each program has. If Dynamo gives
up on one of them, it compiles none: each half is tried then.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
import time
import traceback
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch

from checked_backend.checking import check
from checked_backend.checking.check import Effort
from checked_backend.checking.target import load_compiler
from checked_backend.errors import FuzzError
from checked_backend.findings import Finding, Kind, Severity
from checked_backend.fuzz.build import build, make_inputs
from checked_backend.fuzz.generate.defined import draws, on_other_values
from checked_backend.fuzz.planted import FAULTS
from checked_backend.fuzz.program import Constant, FuzzProgram, encode_program, leaves_of, merge
from checked_backend.fuzz.results import ProgramResult, documented
from checked_backend.fuzz.text import PLANTED
from checked_backend.report import Report
from checked_backend.runs.case import Status
from checked_backend.sweep.examine import SEED_OF_CHECK, why_undecided

_Key = TypeVar("_Key", bound=Hashable)
Compiler = str | Callable[..., Any]
"""A backend of ``torch.compile``, by its name or itself."""

_ALONE = Effort(sizes=6, tiles=3)
"""What one of many programs is checked with: others have other sizes."""

_SHARED = Effort(levels=False)
"""What programs are checked with that share a compile: those that fail are checked alone."""

_HALF = frozenset({"float16", "bfloat16"})
_TO_HALF = frozenset({"Tensor.half", "Tensor.bfloat16"})
_LONGEST = 400
CHECK_FAILED = "the check itself failed"
"""How the message of a program begins whose check raised an exception."""

_PLANTED = f"{PLANTED}:"
_PLACE = re.compile(r"\boutput\[\d+\]|\[x\d+\]")


@functools.cache
def compiler_of(name: str) -> Compiler:
    """The compiler that a name stands for: a backend, ``FILE.py:NAME``, or ``planted:`` and the name of a fault.

    The file's code runs: trust it. The faults are those of `checked_backend.fuzz.planted`. A CheckedBackendError is
    raised if there is no such file, function or fault, or the file raised.
    """
    if not name.startswith(_PLANTED):
        return load_compiler(name)
    fault = FAULTS.get(name.removeprefix(_PLANTED))
    if fault is None:
        raise FuzzError(f"--compiler got {name!r}; there are {', '.join(_PLANTED + known for known in FAULTS)}")
    return fault.compiler


def alike(program: FuzzProgram) -> str:
    """Text that is equal for programs that may share a compile.

    Besides what they must have in common, it says what makes a check compile again: the float64 twin of half precision,
    and the compiler's own random operators. What one program needs would be done for all.
    """
    used = {given.dtype for given in program.inputs}
    used |= {leaf.name for call in program.calls for leaf in leaves_of(call) if isinstance(leaf, Constant)}
    half = bool(used & _HALF) or any(call.op in _TO_HALF for call in program.calls)
    drawn = any(draws(call.op) for call in program.calls)
    return f"{half:d}{drawn:d}{program.gradients:d}{program.dynamic:d}"


def examine(
    programs: Mapping[_Key, FuzzProgram],
    compiler: Compiler,
    options: Mapping[str, Any] | None = None,
    note: Callable[[Sequence[_Key]], None] = lambda _: None,
) -> Iterator[tuple[_Key, ProgramResult]]:
    """Check programs, as one compile if that passes: the key of each, and what came out.

    All are differentiated or none, all are dynamic or none. ``note`` gets the keys of those that are checked now.
    """

    def some(wanted: Sequence[_Key]) -> Iterator[tuple[_Key, ProgramResult]]:
        return examine({key: programs[key] for key in wanted}, compiler, options, note)

    if not programs:
        return
    keys, count = [*programs], len(programs)
    note(keys)
    together, report = _checked([*programs.values()], compiler, options, _SHARED if count > 1 else _ALONE)
    if count == 1:
        yield keys[0], together
        return
    if report is not None and together.status is Status.INCONCLUSIVE and not together.compiled:
        for half in (keys[: count // 2], keys[count // 2 :]):
            yield from some(half)
        return
    owners = owners_of(programs)
    blamed, known = _blamed(together, report, keys, owners)
    share = replace(together, seconds=together.seconds / count, report="")
    yield from ((key, replace(share, **_words(_alone(finding, owners)))) for key, finding in known.items())
    right = [key for key in keys if key not in blamed and key not in known]
    if together.status is Status.FAIL:  # operators are checked by themselves only where nothing fails
        yield from some(right)
    else:
        passed = ProgramResult(Status.PASS, seconds=share.seconds, compiled=share.compiled)
        yield from ((key, passed) for key in right)
    accused: list[tuple[_Key, ProgramResult, Finding]] = []
    clear, wrong = len(blamed) < count, set[_Key]()
    for key in (key for key in keys if key in blamed):
        ((_, alone),) = some([key])
        if alone.status is Status.PASS and (accuser := blamed[key]) is not None:
            accused.append((key, alone, accuser))
            continue
        wrong |= {key} if alone.status is Status.FAIL else set()
        yield key, _unclear(alone, together) if clear and alone.status is Status.PASS else alone
    needs_all = bool(accused) and (clear or not wrong)
    if needs_all:
        (key, _, finding), *accused = accused
        merged = merge([program for other, program in programs.items() if other not in wrong])
        yield key, replace(together, **_words(finding), program=encode_program(merged))
    yield from ((key, _unclear(alone, together) if needs_all and clear else alone) for key, alone, _ in accused)


def _unclear(alone: ProgramResult, together: ProgramResult) -> ProgramResult:
    """The result of a program that passes alone, and is blamed where it shares a compile."""
    remark = f"passes alone, but the compile that it shares with others does not pass: {together.message}"
    return replace(alone, status=Status.INCONCLUSIVE, message=remark[:_LONGEST])


def _blamed(
    together: ProgramResult, report: Report | None, keys: Sequence[_Key], owners: Mapping[str, tuple[_Key, str]]
) -> tuple[dict[_Key, Finding | None], dict[_Key, Finding]]:
    """The programs of a shared compile that need one of their own, and those with a documented difference alone.

    Both are by key, with the finding that accuses it; None if it only has no verdict. Programs of a compile share
    nothing, so a finding about the results or inputs of one says nothing about the others. One that names none may be
    about each.
    """
    blamed: dict[_Key, Finding | None] = {}
    known: dict[_Key, Finding] = {}
    if together.status is Status.PASS:
        return blamed, known
    for finding in report.findings if report is not None else ():
        of_both = f"{finding.expected} {finding.actual}" if finding.kind is Kind.ALIAS else ""
        named = named_in(f"{finding.subject} {of_both}", owners)
        is_known = finding.fails and documented(finding) is not None
        if is_known and named:
            known = {**dict.fromkeys(named, finding), **known}
        elif finding.severity is Severity.ERROR:
            for key in named or keys:
                blamed[key] = blamed.get(key) or (finding if finding.fails and not is_known else None)
    for skip in report.coverage.skipped if report is not None else ():
        for key in (named_in(skip.subject, owners) or keys) if skip.matters else ():
            blamed.setdefault(key, None)
    if not blamed and not known:
        blamed = dict.fromkeys(keys)
    return blamed, {key: finding for key, finding in known.items() if key not in blamed}


def owners_of(programs: Mapping[_Key, FuzzProgram]) -> dict[str, tuple[_Key, str]]:
    """The inputs and results of programs as one, as subjects name them: whose each is, and its name there."""
    found: dict[str, tuple[_Key, str]] = {}
    inputs, results = itertools.count(), itertools.count()
    for key, program in programs.items():
        found |= {f"[x{next(inputs)}]": (key, f"[x{number}]") for number in range(len(program.inputs))}
        found |= {f"output[{next(results)}]": (key, f"output[{number}]") for number in range(len(program.returns))}
    return found


def named_in(text: str, owners: Mapping[str, tuple[_Key, str]]) -> set[_Key]:
    """The programs of a shared compile that a subject, or a text with subjects, is about."""
    return {owners[name][0] for name in _PLACE.findall(text) if name in owners}


def _alone(finding: Finding, owners: Mapping[str, tuple[Any, str]]) -> Finding:
    """A finding of a shared compile as it would be of the program's own."""

    def own(text: str) -> str:
        return _PLACE.sub(lambda name: owners[name[0]][1] if name[0] in owners else name[0], text)

    expected, actual = (None if text is None else own(text) for text in (finding.expected, finding.actual))
    return replace(
        finding, subject=own(finding.subject), message=own(finding.message), expected=expected, actual=actual
    )


def check_program(
    program: FuzzProgram,
    compiler: Compiler,
    options: Mapping[str, Any] | None = None,
    *,
    localize: bool = False,
    isolate: float | None = None,
    levels: bool = True,
) -> ProgramResult:
    """Check one program alone.

    Args:
        localize: Whether to find the operator, reduce it, and write a repro.
        isolate: Do it in a process of its own, whose death is what is looked for; it hangs after so many seconds.
        levels: Whether to find the stage of compilation in which a failure arises.
    """
    more = {} if isolate is None else {"isolate": True, "timeout": isolate}
    effort = replace(_ALONE, levels=levels)
    result, _ = _checked([program], compiler, options, effort, localize=localize, **more)
    return result


def _checked(
    programs: Sequence[FuzzProgram],
    compiler: Compiler,
    options: Mapping[str, Any] | None,
    effort: Effort,
    **more: Any,
) -> tuple[ProgramResult, Report | None]:
    """Check programs as one. There is no report if the check itself failed."""
    began = time.monotonic()
    try:
        torch.manual_seed(SEED_OF_CHECK)
        program, others = merge(programs), merge([on_other_values(one) for one in programs])
        further, refilled = (make_inputs(others.inputs) for _ in range(2))  # in other tensors, then in the first call's
        report = check(
            build(program),
            make_inputs(program.inputs),
            compiler=compiler,
            gradients=program.gradients,
            dynamic=program.dynamic or None,
            compiler_options=dict(options or {}),
            effort=replace(effort, further=[further], refilled=[refilled]),
            **more,
        )
    except SystemExit as stop:  # no program of ours calls sys.exit
        words = f"crash: candidate: compiling or running it called sys.exit({stop.code!r}), eager does not"
        made = ProgramResult(Status.FAIL, words[:_LONGEST], time.monotonic() - began)
        return replace(made, kind="crash", detail="crash.exit", subject="candidate", actual="SystemExit"), None
    except Exception as error:  # that is no verdict, and must be seen
        words = f"{CHECK_FAILED}: {type(error).__name__}: {error}"
        failed = ProgramResult(
            Status.INCONCLUSIVE,
            words[:_LONGEST],
            time.monotonic() - began,
            report=json.dumps({"traceback": traceback.format_exc()}),
        )
        return failed, None
    return _examined(report, time.monotonic() - began), report


def _examined(report: Report, seconds: float) -> ProgramResult:
    status, compiled = Status.of_verdict(report.verdict), bool(report.coverage.regions)
    if status is Status.PASS:
        return ProgramResult(status, seconds=seconds, compiled=compiled)
    failing = [finding for finding in report.findings if finding.fails]
    if not failing:
        return ProgramResult(status, why_undecided(report)[:_LONGEST], seconds, compiled, report=report.to_json())
    worst = min(failing, key=lambda finding: (documented(finding) is not None, finding.is_layout))
    return ProgramResult(status, seconds=seconds, compiled=compiled, report=report.to_json(), **_words(worst))


def _words(finding: Finding) -> dict[str, Any]:
    """The members of `ProgramResult` that tell of a finding."""
    return {
        "message": f"{finding.kind}: {finding.subject}: {finding.message}"[:_LONGEST],
        "kind": str(finding.kind),
        "detail": finding.detail,
        "subject": finding.subject,
        "stage": finding.stage or "",
        "op": finding.op or "",
        "expected": str(finding.expected or "")[:_LONGEST],
        "actual": str(finding.actual or "")[:_LONGEST],
    }
