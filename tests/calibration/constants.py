"""The judge's constants with other values: how far each may be moved before a verdict changes.

``python -m tests.calibration.constants results.jsonl`` takes the results of a run of ``python -m tests.calibration``,
picks the cases nearest to a change of verdict, and prints for each constant, at multiples of its value, which clean
ones would be accused and which bugs missed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest import mock

import torch

from checked_backend.verdict import digits, flips
from checked_backend.verdict import evidence as case
from checked_backend.verdict import outliers as judge
from checked_backend.verdict.steps import float64 as double
from checked_backend.verdict.steps import in_order as hearing
from checked_backend.verdict.steps import monte_carlo as noise_runs
from checked_backend.verdict.steps import nondeterminism as run_to_run

from .run import Outcome, run_case
from .table import detectable

__all__ = ["changed", "main", "nearest"]

MODULES = {
    "judge": judge,
    "flips": flips,
    "digits": digits,
    "case": case,
    "double": double,
    "hearing": hearing,
    "noise_runs": noise_runs,
    "run_to_run": run_to_run,
}
USERS = {
    "flips": (judge, case),
    "judge": (case, hearing, noise_runs),
    "noise_runs": (double, hearing),
    "double": (hearing,),
}
"""Modules into which a module's constants are imported by name."""

CONSTANTS = (
    "judge.ENVELOPE_FACTOR",
    "judge.EAGER_FACTOR",
    "judge.CORRELATED_MAGNITUDE",
    "judge.STRONG_MAGNITUDE",
    "judge.OUT_OF_PROPORTION",
    "flips.STRONG_FACTOR",
    "flips.MISSED_JUMPS",
    "flips.SAME_PLACE",
    "judge.EXACT_ROUNDOFFS",
    "judge.TWIN_TOLERANCE",
    "judge.TWIN_ENVELOPE_FACTOR",
    "digits.LOST",
    "digits.LOST_ROUNDOFFS",
    "digits.EAGER_FACTOR",
    "noise_runs.FIRST_RUNS",
    "noise_runs.MORE_RUNS",
    "double.TWIN_RUNS",
    "hearing.HIDING_ROUNDOFFS",
    "case.VANISHING",
    "case.COARSE",
    "case.REPEATS",
    "run_to_run.ROUNDING_SHRINKS",
    "run_to_run.ROUNDOFFS",
)


def _number(name: str) -> float | int:
    home, _, constant = name.partition(".")
    value = getattr(MODULES.get(home), constant, None)
    if not isinstance(value, (int, float)):
        raise ValueError(f"{name!r} is not MODULE.NAME of a number; the modules are {', '.join(MODULES)}")
    return value


@contextmanager
def changed(settings: Sequence[str]) -> Iterator[None]:
    """Give constants other values.

    Args:
        settings: Words like ``judge.EAGER_FACTOR=2``.

    Raises:
        ValueError: There is no such number.
    """
    with ExitStack() as stack:
        for setting in settings:
            name, _, text = setting.partition("=")
            value = type(_number(name))(float(text))
            home, _, constant = name.partition(".")
            users = (MODULES[home], *USERS.get(home, ()))
            for user in users:
                if hasattr(user, constant):
                    stack.enter_context(mock.patch.object(user, constant, value))
        yield


def nearest(outcomes: Sequence[Outcome], count: int) -> list[Outcome]:
    """The cases nearest to a change of verdict: half of them clean, half of them caught bugs."""
    clean = [each for each in outcomes if not each.case.bug]
    caught = [each for each in outcomes if each.case.bug and each.failed and detectable(each)]
    clean.sort(key=lambda each: max(each.noise_ratio, each.closeness / judge.EAGER_FACTOR), reverse=True)
    caught.sort(key=lambda each: max(each.effect, each.visible))
    return clean[: count // 2] + caught[: count // 2]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, and print one line for each constant and value."""
    parser = argparse.ArgumentParser(prog="python -m tests.calibration.constants", description=__doc__)
    parser.add_argument("results", type=Path, help="JSON lines written by python -m tests.calibration --resume")
    parser.add_argument("--cases", type=int, default=60)
    parser.add_argument("--constants", nargs="*", default=CONSTANTS, choices=CONSTANTS, metavar="NAME")
    parser.add_argument("--multiples", nargs="*", type=float, default=[0.25, 0.5, 2.0, 4.0])
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    outcomes = [Outcome.from_json(json.loads(line)) for line in options.results.read_text().splitlines()]
    hard = nearest(outcomes, options.cases)
    print(f"{len(hard)} cases nearest to a change of verdict, of {len(outcomes)}")
    for name in options.constants:
        for multiple in options.multiples:
            value = _number(name) * multiple
            with changed([f"{name}={value}"]):
                again = [run_case(each.case, effects=False) for each in hard]
            accused = [one.case.family for one, old in zip(again, hard, strict=True) if one.failed and not old.case.bug]
            missed = [old.case.bug for one, old in zip(again, hard, strict=True) if old.failed and not one.failed]
            print(
                f"{name}={value:g}: {len(accused)} clean accused {accused[:3]}, {len(missed)} bugs missed {missed[:3]}"
            )
            sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
