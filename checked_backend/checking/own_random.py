"""Compare a program that draws with the compiler's own random operators, which users get by default.

A check compiles with eager's random operators, so that both sides draw the same numbers. Inductor's own operators are
other code. Their results are compared in structure, and over many runs from other seeds in a few statistics.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import count
from statistics import fmean, pvariance

import torch

from checked_backend.checking.compare_runs import compare_errors, compare_structure
from checked_backend.checking.program import Outcome, Program, ProgramCopy, Stopwatch, Transform
from checked_backend.findings import Finding, Kind, Skip
from checked_backend.report.ledger import Ledger
from checked_backend.subjects import Subject, SubjectKind

RUNS = 40
LEAST_RUNS = 20
"""The least number of runs of each side, from seeds of their own. There are as many runs as there is time for."""

MOST_SECONDS = 20.0
"""Seconds that the runs may take."""

STANDARD_ERRORS = 8.0
"""Means over all runs that differ by more are of other distributions: by chance once in a thousand million checks."""

ROUNDING = 2.0**-8
"""Differences of less than this part of a tensor's size are not ascribed to random numbers."""

_HOW = "with the compiler's own random operators, as without a check (fallback_random=False)"
_SUBJECT = "the compiler's own random operators"

_Statistics = dict[tuple[str, str], tuple[list[float], list[float]]]
"""By tensor and name of the statistic: its values in the runs of eager, and in those of the compiled program."""


def compare_own_random(program: Program, transform: Transform, ledger: Ledger) -> list[Finding]:
    """Compare a program that draws random numbers with the same program compiled to draw its own."""
    made = replace(program, calls=program.calls[:1], continued=False, optimizer=None)
    sides = ProgramCopy(made), ProgramCopy(made, transform)
    seeds = count(1)

    def seeded(side: ProgramCopy) -> Outcome:
        side.start_from(program.rng.reseeded(next(seeds)))
        return side.step(0, program.calls[0])

    reference, candidate = map(seeded, sides)
    findings = _structure(reference, candidate, seeded(sides[0]))
    if findings or reference.error is not None or reference.backward_error is not None:
        ledger.count({"runs with the compiler's own random numbers": 1})
        return findings
    statistics: _Statistics = defaultdict(lambda: ([], []))

    def sample() -> None:
        for place, side in enumerate(sides):
            outcome = seeded(side)
            for key, value in _statistics(outcome.values):
                statistics[key][place].append(value)
            outcome.release()

    watch = Stopwatch()
    sample()
    affordable = int(min(RUNS, MOST_SECONDS / max(watch.seconds(), 1e-9)))
    if affordable < LEAST_RUNS:
        ledger.skip(Skip(_SUBJECT, f"structure alone was compared: {LEAST_RUNS} runs would take too long"))
        return []
    for _ in range(affordable - 1):
        sample()
    ledger.count({"runs with the compiler's own random numbers": affordable})
    first: dict[str, Finding] = {}
    for finding in _different(statistics):
        first.setdefault(finding.subject, finding)
    return list(first.values())


def _structure(reference: Outcome, candidate: Outcome, again: Outcome) -> list[Finding]:
    """Findings about structure, without aspects that differ between two runs of eager: shapes may depend on draws."""
    ledger = Ledger()
    if any(outcome.error or outcome.backward_error for outcome in (reference, candidate, again)):
        found = []
        if not (again.error or again.backward_error):
            during, errors = "running", (reference.error, candidate.error)
            if not any(errors):
                during, errors = "backward", (reference.backward_error, candidate.backward_error)
            found = list(compare_errors(*errors, ledger, lambda: 0, during=during))
    else:
        itself = {(each.detail, each.subject) for each in compare_structure(reference, again, ledger)[0]}
        found = compare_structure(reference, candidate, ledger)[0]
        found = [each for each in found if (each.detail, each.subject) not in itself]
    return [replace(each, stage="compiled", searched=True, message=f"{each.message}, {_HOW}") for each in found]


def _statistics(tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[tuple[str, str], float]]:
    zeros: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.layout is not torch.strided or tensor.is_complex() or tensor.is_meta or not tensor.numel():
            continue
        numbers = tensor.detach().to("cpu", torch.float64).reshape(-1)
        finite = numbers.nan_to_num(0.0, 0.0, 0.0)
        zeros[name] = numbers == 0
        yield (name, "share of zeros"), float(zeros[name].double().mean())
        yield (name, "share of NaN and infinity"), 1 - float(numbers.isfinite().double().mean())
        yield (name, "mean"), float(finite.mean())
        yield (name, "root mean square"), float(finite.square().mean().sqrt())
    for name, mask in zeros.items():
        for other, theirs in zeros.items():
            result = Subject(name).kind is SubjectKind.OUTPUT and Subject(other).is_gradient
            if result and 1 < mask.numel() == theirs.numel():
                same = bool(mask.any()) and not bool(mask.all()) and torch.equal(mask, theirs)
                yield (other, f"zero where {name} is"), float(same)


def _different(statistics: _Statistics) -> Iterator[Finding]:
    """Findings about statistics that differ more than by chance; a tensor may have several."""
    paired = {key: both for key, both in statistics.items() if len(both[0]) == len(both[1])}
    for (name, statistic), (mine, theirs) in paired.items():
        if statistic == "mean" and len({*mine}) == len(mine) and len({*theirs}) == 1:
            message = f"{_HOW} it is the same from every seed"
            yield _finding(name, "rng.seed", message, "another one each time", "the same each time")
        elif statistic.startswith("zero where") and all(mine) and not all(theirs):
            other = statistic.removeprefix("zero where ").removesuffix(" is")
            message = (
                f"{other} and {name} are zero at the same places in eager, and not {_HOW}: the backward pass drops "
                "other elements than the forward pass"
            )
            runs = len(mine)
            yield _finding(
                name, "rng.mask", message, f"{statistic}, in {runs} of {runs} runs", f"in {sum(theirs):.0f} of {runs}"
            )
    for (name, statistic), (mine, theirs) in paired.items():
        if statistic.startswith("zero where"):
            continue
        size = 1 / 4 if statistic.startswith("share") else fmean(statistics[name, "root mean square"][0])
        error = math.sqrt((pvariance(mine) + pvariance(theirs)) / len(mine))
        varies = len({*mine}) > 1 or statistic == "share of NaN and infinity"
        if varies and abs(fmean(mine) - fmean(theirs)) > STANDARD_ERRORS * error + ROUNDING * size:
            message = (
                f"{_HOW} its {statistic} is another one than eager's: over {len(mine)} runs of each, from other "
                f"seeds, by more than {STANDARD_ERRORS:g} standard errors"
            )
            yield _finding(name, "rng.distribution", message, _range(mine), _range(theirs))


def _finding(subject: str, detail: str, message: str, expected: str, actual: str) -> Finding:
    found = Finding(Kind.RNG, subject, message, detail, expected=expected, actual=actual)
    return replace(found, stage="compiled", searched=True)


def _range(values: list[float]) -> str:
    return f"{min(values):.4g} to {max(values):.4g}, on the average {fmean(values):.4g}"
