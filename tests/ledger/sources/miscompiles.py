"""Programs that torch compiles wrongly, clean ones that look as if it did, and the catalogue of miscompiles."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import checked_backend as cb
from checked_backend.fuzz.examine import check_program
from tests.cases import Case as Program
from tests.cases.collection import ALL
from tests.catalogue.entries import Entry, read
from tests.ledger.answer import Answers, Case, of_report, one

QUICK = 12

VECTORISED = frozenset(
    {
        "an int64 arange times a constant wraps as int32 does",
        "atanh of small float32 loses all digits",
        "expm1 of small float64 loses all digits",
        "the remainder of a negative zero has another sign in float16",
        "threshold's gradient at a bfloat16 threshold",
    }
)
"""Entries of the catalogue that are wrong in vector code alone, or otherwise there."""


def cases() -> Iterator[Case]:
    """The programs of `tests.cases` and those of the catalogue, with Inductor."""
    for number, program in enumerate(ALL):
        if program.name == "sum_over_uninitialised":  # what memory holds there is another thing in each run
            continue
        yield Case(f"programs/{program.name}", partial(_checked, program), quick=number % QUICK == 0)
    for number, entry in enumerate(read()):
        name = entry.name.replace("/", " ")
        processor = "its vector code is wrong" if entry.name in VECTORISED else ""
        yield Case(
            f"catalogue/{entry.compiler}/{name}",
            partial(_catalogued, entry),
            quick=number % QUICK == 0,
            processor=processor,
        )


def cases_of(folder: Path) -> Iterator[Case]:
    """The programs of a folder: ``NNNN_name.py`` with ``make``, ``CATEGORY``, ``DYNAMIC`` and ``TRAIN``."""
    for path in sorted(folder.resolve().glob("[0-9]*_*.py")):
        yield Case(f"folder/{path.stem}", partial(_from_file, path))


def _checked(program: Program) -> Answers:
    function, args, kwargs = program.program()
    report = cb.check(function, args, kwargs, dynamic=program.dynamic, gradients=program.train, isolate=True)
    return one(of_report(report))


def _from_file(path: Path) -> Answers:
    spec = importlib.util.spec_from_file_location(f"case_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path.name} cannot be imported")
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function, args, kwargs = module.make()
    localize = module.CATEGORY == "bug"
    report = cb.check(function, args, kwargs, dynamic=module.DYNAMIC, gradients=module.TRAIN, localize=localize)
    return one(of_report(report, localized=localize))


def _catalogued(entry: Entry) -> Answers:
    found = check_program(entry.decoded(), entry.compiler)
    findings = [[found.kind, found.detail, found.subject]] if found.kind else []
    return one({"verdict": str(found.status), "findings": findings})
