"""The work of processes, as `checked_backend.process.job` runs it.

One makes programs and checks them. One confirms a failure: it checks its program again, makes it smaller, finds the
operator, and writes a script.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter

from checked_backend.checking.program_run import fresh_dynamo
from checked_backend.errors import CheckedBackendError
from checked_backend.fuzz.build import build, make_inputs
from checked_backend.fuzz.corpus import Entry, Record
from checked_backend.fuzz.examine import Compiler, alike, check_program, compiler_of, examine
from checked_backend.fuzz.generate.draft import Choices
from checked_backend.fuzz.generate.make import make_program
from checked_backend.fuzz.generate.torchfuzz import TorchFuzz
from checked_backend.fuzz.program import FuzzProgram, decode_program, encode_program
from checked_backend.fuzz.results import DEATHS, ProgramResult, documented, signature_of
from checked_backend.fuzz.shrink import shrink
from checked_backend.fuzz.text import DIFFERS, render_check, render_script
from checked_backend.process.job import AnswerFolder, Job, JobEnd, JobResources, run
from checked_backend.process.worker import run_in_worker
from checked_backend.runs.case import Status, encode

CONFIRMING = "confirming"
"""The stage of a worker that checks a program once more. No stage after it has no answer."""

GENERATING = "generating program"
"""The stage of a worker that makes a program, followed by its number."""

_GENERATE_SECONDS = 300.0
_SECONDS = 90.0
"""Seconds after which a process begins no other batch, so that results come in time."""

_ISOLATED_SECONDS = 60.0
"""Seconds after which a program that is looked at for a crash counts as hung."""

_HUNG_SECONDS = 15.0
"""The same while a program that hangs is made smaller: most that do not hang end before."""

_COMPILER_OF_STAGE: Mapping[str, str] = {"eager": "eager", "aot": "aot_eager"}
"""The compilers that go no further than a stage: Dynamo alone, or Dynamo and AOT autograd."""

_SIGNAL, _EXIT, _HANG = DEATHS
_CALLS = 3


@dataclass(frozen=True, slots=True)
class FuzzOptions:
    """The user's choices for a run.

    Attributes:
        generator: The checkout whose torchfuzz makes them; empty for this package's own generator.
        jobs: How many processes there are at a time.
        seconds: How long it goes on; None for no end.
        programs: After how many programs it ends; None for no end.
        chunk: How many programs a process makes and checks, at most.
        timeout: Seconds for one program, or for one batch.
        reduce_seconds: Seconds for making a program smaller.
    """

    compiler: str = "inductor"
    options: Mapping[str, Any] = field(default_factory=dict)
    choices: Choices = field(default_factory=Choices)
    generator: str = ""
    seed: int = 0
    jobs: int = 1
    seconds: float | None = None
    programs: int | None = None
    batch: int = 8
    chunk: int = 64
    timeout: float = 120.0
    reduce_seconds: float = 60.0
    localize: bool = True
    scripts: bool = True
    place: JobResources = field(default_factory=JobResources)
    folder: Path = Path("checked_backend_fuzz")


_OPTIONS = TypeAdapter(FuzzOptions)


def options_of(question: Mapping[str, Any]) -> FuzzOptions:
    """The options in the question to a process, as `dataclasses.asdict` has them."""
    return _OPTIONS.validate_python(question["asked"])


def begin(reports: str | Path) -> None:
    """Prepare this process, which does one job and says nothing: reports of its checks go to a folder."""
    warnings.simplefilter("ignore")
    os.environ["CHECKED_BACKEND_PROGRESS"] = "0"  # the terminal shows that of all workers
    os.environ["CHECKED_BACKEND_REPORT_DIR"] = str(reports)


def check(question: Mapping[str, Any], answers: AnswerFolder) -> None:
    """Make the programs of these numbers, and check those at once that may share a compile.

    Each answer is a `checked_backend.fuzz.corpus.Record`. It has what is being checked as *lost*.
    """
    begin(answers.path / "reports")
    answers.note("loading the compiler", _GENERATE_SECONDS)
    asked = options_of(question)
    make: Callable[[int, int], FuzzProgram] = partial(make_program, choices=asked.choices)
    if asked.generator:
        make = TorchFuzz(Path(asked.generator), asked.choices).program
    compiler, begun = compiler_of(asked.compiler), time.monotonic()
    waiting: dict[str, list[Entry]] = defaultdict(list)
    done: list[Entry] = []

    def tell(now: Sequence[Entry] = ()) -> None:
        answers.answer(encode(Record(programs=[*done, *now])))

    def check_together(entries: Sequence[Entry]) -> bool:
        """Whether something failed that is to be confirmed before more is checked."""

        def note(now: Sequence[Entry]) -> None:
            tell(now)
            answers.note("checking", asked.timeout)

        programs = {entry: decode_program(entry.text) for entry in entries}
        for entry, result in examine(programs, compiler, asked.options, note):
            done.append(replace(entry, result=result))
            tell()
        return any(entry.failed and documented(entry.result) is None for entry in done)

    for number in question["numbers"]:
        answers.note(f"{GENERATING} {number}", _GENERATE_SECONDS)
        try:
            program = make(asked.seed, number)
        except (LookupError, CheckedBackendError) as error:  # a program of torchfuzz that none of ours can be
            done.append(Entry(asked.seed, number, "", ProgramResult(Status.SKIPPED, str(error))))
            tell()
            continue
        kind = alike(program)
        entry = Entry(asked.seed, number, encode_program(program), ProgramResult(Status.LOST), program.ops)
        waiting[kind].append(entry)
        if program.dynamic or len(waiting[kind]) >= question["batch"]:
            failed = check_together(waiting.pop(kind))
            if failed or time.monotonic() - begun > _SECONDS:
                break  # what waits here is made again
    else:
        for entries in waiting.values():
            check_together(entries)
    answers.note("done")


def death_of(program: FuzzProgram, compiler: Compiler, options: Mapping[str, Any], seconds: float) -> str:
    """How a process ends that compiles a program and calls it as a check does, without any check: one of `DEATHS`.

    Empty if it does not die. It hangs after so many seconds. A CheckedBackendError is raised if no process can be
    forked.
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


def confirm(question: Mapping[str, Any], answers: AnswerFolder) -> None:
    """Answer with a record of the group of the smallest program found that fails as the given one does.

    Each answer is better than the last: a later step may end this process.
    """
    program, asked = decode_program(question["program"]), options_of(question)
    begin(asked.folder if question["localize"] else answers.path / "reports")  # other reports are in the answer
    answers.note("loading the compiler")
    checked = partial(check_program, compiler=compiler_of(asked.compiler), options=asked.options)
    answers.note(CONFIRMING)
    first = checked(program, isolate=_patience(asked) if question["isolate"] else None)

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
        smallest, last = _smaller(program, first, asked, deadline, tell)
    tell(smallest, last)
    if question["localize"]:
        answers.note("localizing")
        localized = checked(smallest, localize=True)
        if localized.kind:
            last = replace(localized, stage=localized.stage or last.stage)
            tell(smallest, last)
    if asked.scripts:
        answers.note("running the script")
        tell(smallest, last, *_script(smallest, last, asked))


def _patience(asked: FuzzOptions) -> float:
    """Seconds after which a program hangs."""
    return min(_ISOLATED_SECONDS, asked.timeout)


def _smaller(
    program: FuzzProgram,
    first: ProgramResult,
    asked: FuzzOptions,
    deadline: float,
    tell: Callable[[FuzzProgram, ProgramResult], None],
) -> tuple[FuzzProgram, ProgramResult]:
    """The smallest program found that fails in the same way, and what came out for it.

    It is looked for where compilation goes no further than the fault's stage: that costs a small part of what a
    compiler such as Inductor takes. What fails there need not fail so when it is compiled to the end.
    """
    smallest, last = program, first
    levels = first.stage == "eager"  # only there the kind depends on the level
    checked = partial(check_program, compiler=compiler_of(asked.compiler), options=asked.options)

    def goes_wrong(candidate: FuzzProgram) -> bool:
        nonlocal smallest, last
        came = checked(candidate, levels=levels)
        if not came.fails_as(first):
            return False
        smallest, last = candidate, replace(came, stage=came.stage or first.stage)
        tell(smallest, last)
        return True

    soon, compiler = program, _COMPILER_OF_STAGE.get(first.stage, asked.compiler)

    def goes_wrong_soon(candidate: FuzzProgram) -> bool:
        return check_program(candidate, compiler, levels=levels).fails_as(first)

    if compiler != asked.compiler and goes_wrong_soon(program):
        soon = shrink(program, goes_wrong_soon, deadline)
    if soon == program or not goes_wrong(soon):
        shrink(program, goes_wrong, deadline)
    if smallest is not program and not levels:
        whole = checked(smallest)
        last = whole if whole.fails_as(first) else last
    return smallest, last


def _smaller_that_dies(program: FuzzProgram, first: ProgramResult, asked: FuzzOptions, deadline: float) -> FuzzProgram:
    """The smallest program found that ends its process in the same way."""
    hangs, patience, compiler = first.detail == _HANG, _patience(asked), compiler_of(asked.compiler)

    def dies(candidate: FuzzProgram, seconds: float) -> bool:
        return death_of(candidate, compiler, asked.options, seconds) == first.detail

    soon = min(_HUNG_SECONDS, patience) if hangs else patience
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
