"""Confirm a failure in a fresh process: check its program again, make it smaller, find the operator, write a script."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from checked_backend.checking.program_run import fresh_dynamo
from checked_backend.fuzz.build import build, make_inputs
from checked_backend.fuzz.corpus import Record
from checked_backend.fuzz.examine import HUNG_SECONDS, ISOLATED_SECONDS, Compiler, check_program, compiler_of
from checked_backend.fuzz.program import FuzzProgram, decode_program
from checked_backend.fuzz.results import DEATHS, ProgramResult, signature_of
from checked_backend.fuzz.shrink import shrink
from checked_backend.fuzz.text import DIFFERS, render_check, render_script
from checked_backend.fuzz.worker import CONFIRMING, FuzzOptions, begin, options_of
from checked_backend.process.job import AnswerFolder, Job, JobEnd, JobResources, run
from checked_backend.process.worker import run_in_worker
from checked_backend.runs.case import encode

_CALLS = 3


def death_of(program: FuzzProgram, compiler: Compiler, options: Mapping[str, Any], seconds: float) -> str:
    """The finer kind of how a process ends that compiles a program and calls it as a check does, without any check.

    Args:
        seconds: After which it hangs.

    Returns:
        One of `checked_backend.fuzz.results.DEATHS`; empty if the process does not die.

    Raises:
        CheckedBackendError: No process can be forked here.
    """

    def run_it() -> str:
        compiled: Any = torch.compile(
            build(program), backend=compiler, options=dict(options) or None, dynamic=program.dynamic or None
        )
        with suppress(Exception), fresh_dynamo(), torch.set_grad_enabled(program.gradients):  # who raises lives
            for _ in range(_CALLS):
                results = compiled(*make_inputs(program.inputs))
                roots = [one for one in results if isinstance(one, torch.Tensor) and one.requires_grad]
                if program.gradients and roots:
                    torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
        return "lives"

    ended = run_in_worker(run_it, timeout=seconds)
    return ended.detail if isinstance(ended, JobEnd) else ""


_COMPILER_OF_STAGE: Mapping[str, str] = {"eager": "eager", "aot": "aot_eager"}
"""The compilers that go no further than a stage: Dynamo alone, or Dynamo and AOT autograd."""

_SIGNAL, _EXIT, _HANG = "crash.signal", "crash.exit", "crash.hang"


def confirm(question: Mapping[str, Any], answers: AnswerFolder) -> None:
    """Answer with a record of the group of the smallest program found that fails as the given one does.

    Args:
        question: The program, the options of the run, and what else to do.
        answers: Where answers go, each better than the last: a later step may end this process.
    """
    program, asked = decode_program(question["program"]), options_of(question)
    begin(asked.folder if question["localize"] else answers.path / "reports")  # other reports are in the answer
    answers.note("loading the compiler")
    check = partial(check_program, compiler=compiler_of(asked.compiler), options=asked.options)
    answers.note(CONFIRMING)
    first = check(program, isolate=_patience(asked) if question["isolate"] else None)

    def tell(smallest: FuzzProgram, came: ProgramResult, script: str = "", shown: bool = False) -> None:
        group = replace(signature_of(smallest, came), confirmed=True, script=script, script_shows=shown)
        answers.answer(encode(Record(group=group)))

    tell(program, first)
    if not first.kind:
        return
    answers.note("reducing")
    deadline = time.monotonic() + (0.0 if question["localize"] else asked.reduce_seconds)
    if first.detail in DEATHS:
        smallest, last = _smaller_that_dies(program, first, asked, deadline), first
    else:
        soon = _smaller_at_its_stage(program, first, asked.compiler, deadline)
        smallest, last = _smaller(program, first, soon, check, deadline, tell)
    tell(smallest, last)
    if question["localize"]:
        answers.note("localizing")
        localized = check(smallest, localize=True)
        if localized.kind:
            last = replace(localized, stage=localized.stage or last.stage)
            tell(smallest, last)
    if asked.scripts:
        answers.note("running the script")
        tell(smallest, last, *_script(smallest, last, asked))


def _patience(asked: FuzzOptions) -> float:
    """Seconds after which a program hangs."""
    return min(ISOLATED_SECONDS, asked.timeout)


def _smaller(
    program: FuzzProgram,
    first: ProgramResult,
    soon: FuzzProgram,
    check: Callable[..., ProgramResult],
    deadline: float,
    tell: Callable[[FuzzProgram, ProgramResult], None],
) -> tuple[FuzzProgram, ProgramResult]:
    """The smallest program found that fails in the same way, and what came out for it; ``soon`` is tried first."""
    smallest, last = program, first
    levels = first.stage == "eager"  # only there the kind depends on the level

    def goes_wrong(candidate: FuzzProgram) -> bool:
        nonlocal smallest, last
        came = check(candidate, levels=levels)
        if not came.fails_as(first):
            return False
        smallest, last = candidate, replace(came, stage=came.stage or first.stage)
        tell(smallest, last)
        return True

    if soon == program or not goes_wrong(soon):
        shrink(program, goes_wrong, deadline)
    if smallest is not program and not levels:
        whole = check(smallest)
        last = whole if whole.fails_as(first) else last
    return smallest, last


def _smaller_at_its_stage(program: FuzzProgram, first: ProgramResult, name: str, deadline: float) -> FuzzProgram:
    """The smallest program found that fails in the same way where compilation goes no further than the fault's stage.

    To compile so far costs a small part of what a compiler such as Inductor takes. What fails there need not fail so
    when it is compiled to the end.
    """
    compiler = _COMPILER_OF_STAGE.get(first.stage)
    if compiler in (None, name):
        return program

    def goes_wrong(candidate: FuzzProgram) -> bool:
        return check_program(candidate, compiler, levels=first.stage == "eager").fails_as(first)

    return shrink(program, goes_wrong, deadline) if goes_wrong(program) else program


def _smaller_that_dies(program: FuzzProgram, first: ProgramResult, asked: FuzzOptions, deadline: float) -> FuzzProgram:
    """The smallest program found that ends its process in the same way."""
    hangs, patience, compiler = first.detail == _HANG, _patience(asked), compiler_of(asked.compiler)

    def dies(candidate: FuzzProgram, seconds: float) -> bool:
        return death_of(candidate, compiler, asked.options, seconds) == first.detail

    soon = min(HUNG_SECONDS, patience) if hangs else patience
    smallest = shrink(program, lambda candidate: dies(candidate, soon), deadline)
    slow = hangs and smallest != program and not dies(smallest, patience)
    return program if slow else smallest


def _script(program: FuzzProgram, result: ProgramResult, asked: FuzzOptions) -> tuple[str, bool]:
    """A script, and whether it shows the failure: localizing's own, one of torch alone, or one that checks."""
    report = json.loads(result.report or "{}")
    timeout = _patience(asked) if result.detail == _HANG else asked.timeout
    repros = [finding.get("repro") for finding in report.get("findings", ()) if finding.get("repro")]
    for path in map(Path, repros):
        if path.is_file() and shows(path, timeout, result.detail):
            return path.read_text(encoding="utf-8"), True
    name, about = asked.compiler, [result.message]
    plain = render_script(program, name, about)
    scripts = [
        (plain, DIFFERS),
        (render_script(program, name, about, again=True), DIFFERS),
        (render_check(program, name, asked.options, about), "FAIL: "),
        (render_check(program, name, asked.options, about, again=True), "FAIL: "),
    ]
    with tempfile.TemporaryDirectory(prefix="checked-backend-fuzz-") as folder:
        path = Path(folder) / "repro.py"
        for script, says in scripts:
            path.write_text(script, encoding="utf-8")
            if shows(path, timeout, result.detail, says):
                return script, True
    return plain, False


def shows(path: Path, timeout: float, detail: str, says: str = "") -> bool:
    """Whether a script ends as it does while the bug is there, in a fresh process.

    Args:
        detail: The finer kind of the failure. A script of a bug that ends its process is ended by it.
        says: What it prints in other cases; an error of its own would end it, too.
    """
    try:
        compile(path.read_bytes(), str(path), "exec", dont_inherit=True)  # else it would end alike for ever
        job = Job("checked_backend.process.job:run_script", {"path": str(path)}, timeout)
        ended = run(job, JobResources(folder=str(path.parent)))
    except (OSError, SyntaxError, ValueError):
        return False
    if detail == _HANG or ended.overdue is not None:
        return detail == _HANG and ended.overdue is not None
    if detail == _SIGNAL:
        return ended.exit < 0
    if detail == _EXIT:
        return ended.exit not in (0, 1)
    return ended.exit == 1 and says in ended.log
