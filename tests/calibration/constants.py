"""The thresholds of the verdict with other values: how far each may be moved before a verdict changes.

``python -m tests.calibration.constants results.jsonl`` takes the results of a run of ``python -m tests.calibration``,
picks the cases nearest to a change of verdict, and prints for each constant, at multiples of its value, which clean
ones would fail and which bugs be missed.
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

from checked_backend.verdict import thresholds

from .run import Outcome, run_case
from .table import detectable

CONSTANTS = (
    "ENVELOPE_FACTOR",
    "EAGER_FACTOR",
    "CORRELATED_MAGNITUDE",
    "STRONG_MAGNITUDE",
    "DRAW_FACTOR",
    "MISSED_JUMPS",
    "TWIN_TOLERANCE",
    "TWIN_ENVELOPE_FACTOR",
    "LOST_DIGITS",
    "LOST_DIGITS_ROUNDOFFS",
    "LOST_DIGITS_EAGER_FACTOR",
    "FIRST_RUNS",
    "MORE_RUNS",
    "FEW_RUNS",
    "HIDING_ROUNDOFFS",
    "VANISHING",
    "FAR_SMALLER",
    "SPREAD_ROUNDOFFS",
)


def _number(name: str) -> float | int:
    value = getattr(thresholds, name, None)
    if not isinstance(value, (int, float)):
        raise ValueError(f"{name!r} is no number in {thresholds.__name__}")
    return value


@contextmanager
def changed(settings: Sequence[str]) -> Iterator[None]:
    """Give constants other values, by words like ``EAGER_FACTOR=2``; ValueError if there is no such number."""
    with ExitStack() as stack:
        for setting in settings:
            name, _, text = setting.partition("=")
            value = type(_number(name))(float(text))
            stack.enter_context(mock.patch.object(thresholds, name, value))
        yield


def nearest(outcomes: Sequence[Outcome], count: int) -> list[Outcome]:
    """The cases nearest to a change of verdict: half of them clean, half of them caught bugs."""
    clean = [each for each in outcomes if not each.case.bug]
    caught = [each for each in outcomes if each.case.bug and each.failed and detectable(each)]
    clean.sort(key=lambda each: max(each.noise_ratio, each.closeness / thresholds.EAGER_FACTOR), reverse=True)
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
            failed = [one.case.family for one, old in zip(again, hard, strict=True) if one.failed and not old.case.bug]
            missed = [old.case.bug for one, old in zip(again, hard, strict=True) if old.failed and not one.failed]
            print(f"{name}={value:g}: {len(failed)} clean failed {failed[:3]}, {len(missed)} bugs missed {missed[:3]}")
            sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
