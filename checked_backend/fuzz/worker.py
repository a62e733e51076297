"""The process that generates, checks or confirms: ``python -m checked_backend.fuzz.worker FOLDER PARENT``.

It takes a question as JSON on stdin, and writes its answer and its current stage to files in the folder, which outlive
it. ``generate`` answers with programs, ``check`` with what came out for each program, as soon as it is known;
``confirm`` checks one program, makes it smaller, and answers with both.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from checked_backend.errors import CheckedBackendError, FuzzError
from checked_backend.process.child import die_with, limit_memory
from checked_backend.sweep.worker import AnswerFolder

__all__ = ["CONFIRMING", "GENERATING", "MODULE", "OUT_OF_TIME", "main"]

MODULE = "checked_backend.fuzz.worker"

CONFIRMING = "confirming"
"""The stage of a worker that checks a program once more. No stage after it has no answer."""

GENERATING = "generating program"
"""The stage of a worker that makes a program, followed by its number."""

OUT_OF_TIME = "out of time"
"""The last stage of a worker that leaves programs unchecked because its time is over."""

_Question = Mapping[str, Any]
_SIGNAL, _EXIT, _HANG = "crash.signal", "crash.exit", "crash.hang"


def main(folder: Path, parent: int) -> None:
    """Answer one question.

    Args:
        folder: The folder for the answer.
        parent: The id of the process that asks. This process ends with it.
    """
    die_with(parent)
    question = json.loads(sys.stdin.read())
    limit_memory(question.get("memory"))
    answers = AnswerFolder(folder)
    answers.note("importing torch")
    warnings.simplefilter("ignore")
    torch = importlib.import_module("torch")
    if question.get("threads"):
        torch.set_num_threads(question["threads"])
    kept = question.get("reports") if question.get("localize") else None  # other reports are in the answer
    os.environ["CHECKED_BACKEND_PROGRESS"] = "0"  # the terminal shows that of all workers
    os.environ["CHECKED_BACKEND_REPORT_DIR"] = kept or str(folder / "reports")
    os.environ.setdefault("HYPOTHESIS_STORAGE_DIRECTORY", str(folder / "hypothesis"))  # else it makes one where we are
    asks: Mapping[str, Callable[[_Question, AnswerFolder], None]] = {
        "generate": _generate,
        "check": _check,
        "confirm": _confirm,
        "selftest": _selftest,
    }
    asks[question["ask"]](question, answers)


def _generate(question: _Question, answers: AnswerFolder) -> None:
    make = importlib.import_module("checked_backend.fuzz.generate.make")
    strategies = importlib.import_module("checked_backend.fuzz.strategies")
    make_choices = importlib.import_module("checked_backend.fuzz.generate.choices").Choices
    encode = importlib.import_module("checked_backend.fuzz.program").encode_program
    alike = importlib.import_module("checked_backend.fuzz.examine").alike
    raw = question["choices"]
    choices = make_choices(tuple(raw["ops"]), tuple(raw["dtypes"]), raw["training"], raw["dynamic"], raw["longest"])
    rules, wanted = make.rules_for(()), make.rules_for(choices.ops) if choices.ops else ()
    if choices.ops and not wanted:
        answers.answer(json.dumps({"refused": "--ops names no operation that is known"}))
        return
    try:
        of = _generator(question, choices)
    except FuzzError as error:
        answers.answer(json.dumps({"refused": str(error)}))
        return
    made: dict[int, Any] = {}
    left_out: Counter[str] = Counter()
    for number in range(question["start"], question["start"] + question["count"]):
        answers.note(f"{GENERATING} {number}")
        try:
            program = of(number) if of else strategies.make_program(question["seed"], number, choices, rules, wanted)
        except LookupError:
            continue
        except CheckedBackendError as error:  # a program of torchfuzz that none of ours can be
            left_out[str(error)] += 1
            continue
        made[number] = {"program": encode(program), "covers": make.covered(program), "alike": alike(program)}
        answers.answer(json.dumps({"programs": made, "left_out": left_out}))  # a later one may end this process
    answers.answer(json.dumps({"programs": made, "left_out": left_out}))
    answers.note("done")


def _generator(question: _Question, choices: Any) -> Callable[[int], Any] | None:
    """What makes the program of a number, if it is not this package's own generator."""
    if not question["generator"]:
        return None
    module = importlib.import_module("checked_backend.fuzz.generate.torchfuzz")
    torchfuzz = module.TorchFuzz(Path(question["generator"]), choices)
    return lambda number: torchfuzz.program(question["seed"], number)


def _check(question: _Question, answers: AnswerFolder) -> None:
    examining = importlib.import_module("checked_backend.fuzz.examine")
    programs = [importlib.import_module("checked_backend.fuzz.program").decode_program(t) for t in question["programs"]]
    found: dict[int, Any] = {}
    answers.note("loading the compiler")
    compiler = examining.compiler_of(question["compiler"])
    batch, begun = max(1, question["batch"]), time.monotonic()
    for start in range(0, len(programs), batch):
        if time.monotonic() - begun > question["seconds"]:
            answers.note(OUT_OF_TIME)  # else the compiler has ended this process
            return
        places = list(range(start, min(start + batch, len(programs))))

        def note(what: str, places: list[int] = places) -> None:
            words = what if what == "batch" else f"program {places[int(what.split()[1])]}"
            answers.note(f"{words} {places[0]} {places[-1]}")

        for place, came in examining.examine([programs[p] for p in places], compiler, question["options"], note):
            found[places[place]] = json.loads(came.to_json())
            answers.answer(json.dumps(found))


def _confirm(question: _Question, answers: AnswerFolder) -> None:
    """Check one program in this fresh process, and make it smaller until the time is over."""
    examining = importlib.import_module("checked_backend.fuzz.examine")
    program_module = importlib.import_module("checked_backend.fuzz.program")
    shrink = importlib.import_module("checked_backend.fuzz.shrink").shrink
    program = program_module.decode_program(question["program"])
    answers.note("loading the compiler")
    compiler, options = examining.compiler_of(question["compiler"]), question["options"]
    answers.note(CONFIRMING)
    isolate = examining.ISOLATED_SECONDS if question.get("isolate") else None
    first = examining.check_program(program, compiler, options, isolate=isolate)

    def tell(smallest: Any, came: Any, **script: Any) -> None:
        text = program_module.encode_program(smallest)
        answers.answer(json.dumps({"program": text, "result": json.loads(came.to_json()), **script}))

    tell(program, first)
    if not first.kind:
        return
    smallest, last = program, first
    hangs = first.detail == _HANG
    soon = examining.HUNG_SECONDS if hangs else isolate

    def goes_wrong(candidate: Any) -> bool:
        nonlocal smallest, last
        came = examining.check_program(candidate, compiler, options, isolate=soon)
        if (came.kind, came.detail) != (first.kind, first.detail):
            return False
        smallest, last = candidate, came
        if not hangs:
            tell(candidate, came)
        return True

    answers.note("reducing")
    shrink(program, goes_wrong, time.monotonic() + question["seconds"])
    if hangs and smallest is not program:
        last = examining.check_program(smallest, compiler, options, isolate=isolate)
        if last.detail != _HANG:  # it was slow only
            smallest, last = program, first
        tell(smallest, last)
    if question.get("localize"):
        answers.note("localizing")
        localized = examining.check_program(smallest, compiler, options, localize=True)
        if localized.kind:
            last = replace(localized, stage=localized.stage or last.stage)
            tell(smallest, last)
    if question["scripts"]:
        answers.note("running the script")
        tell(smallest, last, **_scripted(smallest, last, question["compiler"], question))


def _scripted(program: Any, result: Any, compiler: str, question: _Question) -> dict[str, Any]:
    """A script that shows the failure in a fresh process: localizing's own, one of torch alone, or one that checks."""
    report = json.loads(result.report or "{}")
    timeout = importlib.import_module("checked_backend.fuzz.examine").ISOLATED_SECONDS
    timeout = min(question["timeout"], timeout) if result.detail == _HANG else question["timeout"]
    repros = [finding.get("repro") for finding in report.get("findings", ()) if finding.get("repro")]
    for path in map(Path, repros):
        if path.is_file() and _shows(path, timeout, result.detail):
            return {"script": path.read_text(encoding="utf-8"), "script_shows": True}
    text = importlib.import_module("checked_backend.fuzz.text")
    about = [result.message]
    plain = text.render_script(program, compiler, about)
    scripts = [
        (plain, ""),
        (text.render_script(program, compiler, about, again=True), ""),
        (text.render_check(program, compiler, question["options"], about), "FAIL: "),
        (text.render_check(program, compiler, question["options"], about, again=True), "FAIL: "),
    ]
    with tempfile.TemporaryDirectory(prefix="checked-backend-fuzz-") as folder:
        path = Path(folder) / "repro.py"
        for script, says in scripts:
            path.write_text(script, encoding="utf-8")
            if _shows(path, timeout, result.detail, says):
                return {"script": script, "script_shows": True}
    return {"script": plain, "script_shows": False}


def _shows(path: Path, timeout: float, detail: str, says: str = "") -> bool:
    """Whether a script ends as it does while the bug is there, in a fresh process, and prints some words.

    One of a bug that ends the process is ended by it.
    """
    environment = {name: value for name, value in os.environ.items() if name != "CHECKED_BACKEND"}
    try:
        compile(path.read_bytes(), str(path), "exec", dont_inherit=True)  # else it would end alike for ever
        ended = subprocess.run(
            [sys.executable, str(path)],
            cwd=path.parent,
            env=environment,
            capture_output=True,
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return detail == _HANG
    except (OSError, SyntaxError, ValueError):
        return False
    if detail == _SIGNAL and not says:
        return ended.returncode < 0
    wanted = ended.returncode not in (0, 1) if detail == _EXIT and not says else ended.returncode == 1
    return wanted and says.encode() in ended.stdout


def _selftest(question: _Question, answers: AnswerFolder) -> None:
    """Try planted faults."""
    try_faults = importlib.import_module("checked_backend.fuzz.try_faults").try_faults
    counts = {name: question[name] for name in ("seed", "most", "control")}
    found = []
    for tried in try_faults(question["faults"], **counts, note=answers.note):
        found.append(asdict(tried))
        answers.answer(json.dumps(found))  # a fault that takes all the time hides no other result


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # skips threads and destructors, which could change the exit status
