"""Every fifth case of the calibration: clean programs that round otherwise, and planted bugs, on both faces."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from tests.calibration.__main__ import cases as calibration_cases
from tests.calibration.families import FAMILIES
from tests.calibration.run import Case as Program
from tests.calibration.run import run_case
from tests.ledger.answer import Answers, Case, one

EVERY = 5
QUICK = 40
"""Every so many cases of these are quick, too."""


def cases() -> Iterator[Case]:
    """The cases of both faces."""
    for face in ("check", "numcheck"):
        dtypes, modes = ("float32", "bfloat16"), ("inference", "training")
        every = calibration_cases(list(FAMILIES), dtypes, modes, "eager", face, ("clean", "bugs"), 0)
        for number, program in enumerate([*every][::EVERY]):
            name = "/".join(part for part in (program.family, program.dtype, program.mode, program.compiler) if part)
            bug = f"/{program.bug}" if program.bug else ""
            yield Case(f"calibration/{face}/{name}{bug}", partial(_answer, program), quick=number % QUICK == 0)


def _answer(program: Program) -> Answers:
    outcome = run_case(program, effects=False)
    rows = [row.partition(" ") for row in {*outcome.findings}]
    findings = sorted([detail.partition(".")[0], detail, subject] for detail, _, subject in rows)
    return one({"verdict": outcome.verdict, "findings": findings})
