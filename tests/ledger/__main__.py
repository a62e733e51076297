"""``python -m tests.ledger``: run the cases, and say which answers are not those of ``answers.json``.

Exit codes: 0 nothing changed, 1 answers changed, 2 or 3 misuse. ``--accept`` writes the answers down after that.
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import json
import subprocess
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from tests.calibration.ablation import MECHANISMS
from tests.ledger.answer import Answer, Case, differences, read, write
from tests.ledger.pool import run_cases
from tests.ledger.sources import all_cases

ROOT = Path(__file__).resolve().parents[2]
_SOURCES = ("checked_backend", "tests", "examples")
ANSWERS = Path(__file__).with_name("answers.json")
TORCH = "2.13"
"""The version of torch whose answers ``answers.json`` holds: others compile other programs wrongly."""


def main(words: Sequence[str] | None = None) -> int:
    """Run the cases asked for; the exit code."""
    options = _options(words)
    if not torch.__version__.startswith(f"{TORCH}.") and options.answers == ANSWERS:
        print(f"the answers are of torch {TORCH}, this is {torch.__version__}: name others with --answers FILE")
        return 3
    listed = [*all_cases(options.cases)]
    cases = [case for case in listed if _chosen(case, options)]
    for glob in options.only:
        if not fnmatch.filter((case.name for case in listed), glob):
            print(f"no case has such a name: {glob}")
            return 3
    if options.cases and not any(case.name.startswith("folder/") for case in listed):
        print(f"no case is in {options.cases}")
        return 3
    if options.list:
        print(*(case.name for case in cases), sep="\n")
        return 0
    with MECHANISMS[options.without]() if options.without else nullcontext():
        now = _answers(cases, options)
    known = read(options.answers)
    before = {name: answer for name, answer in known.items() if _asked(name.partition("::")[0], cases, options)}
    names = {case.name for case in listed}
    lost = {name.partition("::")[0] for name in known.keys() - before.keys()} - names
    lines = [*differences(before, now), *(f"{name}: no such case any more" for name in sorted(lost) if _is_ours(name))]
    print(*lines, f"{len(now)} answers compared, {len(lines)} changed", sep="\n")
    if options.accept:
        write(options.answers, {name: answer for name, answer in known.items() if name not in before} | now)
        print(f"{len(now)} answers written")
        return 0
    return 1 if lines else 0


def _is_ours(name: str) -> bool:
    """Whether a case is one of this repository's; those of ``--cases`` are known only where that is given."""
    return not name.startswith("folder/")


def _options(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.ledger", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="only the cases that together take a few minutes")
    parser.add_argument("--only", nargs="+", default=["*"], metavar="GLOB", help="only cases of these names")
    parser.add_argument("--list", action="store_true", help="print the names of the cases")
    parser.add_argument("--accept", action="store_true", help="write the answers down as the expected ones")
    parser.add_argument("--answers", type=Path, default=ANSWERS, metavar="FILE", help="the expected answers")
    parser.add_argument("--cases", type=Path, metavar="DIR", help="more cases: files that define make() and CATEGORY")
    parser.add_argument("--results", type=Path, metavar="FILE", help="keep answers here, and go on where it ends")
    without = "switch a mechanism off: the answers that change rest on it"
    parser.add_argument("--without", choices=MECHANISMS, metavar="MECHANISM", help=without)
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="cases at a time")
    return parser.parse_args(words)


def _chosen(case: Case, options: argparse.Namespace) -> bool:
    return (case.quick or not options.quick) and any(fnmatch.fnmatchcase(case.name, glob) for glob in options.only)


def _asked(name: str, cases: Sequence[Case], options: argparse.Namespace) -> bool:
    """Whether a run answers a case; one that is gone is asked for by a whole run."""
    whole = not options.quick and options.only == ["*"] and (options.cases or not name.startswith("folder/"))
    return whole or any(name == case.name for case in cases)


def _answers(cases: Sequence[Case], options: argparse.Namespace) -> dict[str, Answer]:
    """The answers of all cases: those that an earlier run has kept, and those of the cases that are run now."""
    tree = _tree(options.cases) if options.results else ""
    kept = kept_results(options.results, tree) if options.results else {}
    waiting = [case for case in cases if case.name not in kept]
    for number, done in enumerate(run_cases(waiting, options.jobs), 1):
        kept[done.case.name] = done.answers
        print(f"{number}/{len(waiting)} {done.case.name} {done.seconds:.1f} s", file=sys.stderr, flush=True)
        if options.results:
            row = {"tree": tree, "case": done.case.name, "answers": done.answers, "seconds": round(done.seconds, 1)}
            with options.results.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
    return {name: answer for case in cases for name, answer in kept[case.name].items()}


def kept_results(path: Path, tree: str) -> dict[str, dict[str, Answer]]:
    """The answers by case that a file of results has of a tree."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return {row["case"]: row["answers"] for row in map(_row, lines) if row.get("tree") == tree}


def _row(line: str) -> dict[str, Any]:
    """A line of the results; nothing of one that was cut off."""
    try:
        row: dict[str, Any] = json.loads(line)
    except ValueError:
        return {}
    return row


def _tree(cases: Path | None = None) -> str:
    """Names the state of the sources, of the cases and of torch: answers of another state are not gone on with."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", *_SOURCES]
    known = subprocess.run(listed, cwd=ROOT, capture_output=True, check=True).stdout.decode().split("\0")
    paths = [ROOT / name for name in known if name and name != ANSWERS.relative_to(ROOT).as_posix()]
    digest = hashlib.sha256(torch.__version__.encode())
    for path in sorted({*paths, *(cases.rglob("*") if cases else ())}):
        if path.is_file() and path.suffix != ".pyc":
            digest.update(path.as_posix().removeprefix(ROOT.as_posix()).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


if __name__ == "__main__":
    sys.exit(main())
