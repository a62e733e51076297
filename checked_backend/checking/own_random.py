"""Compare a program that draws with the compiler's own random operators, which users get by default.

A check compiles with eager's random operators, so that both sides draw the same numbers. Inductor's own operators are
other code. Their results are compared in structure, and over many runs from other seeds in what dropout makes: how many
elements are zero, and whether the backward pass drops those that the forward pass dropped.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from statistics import fmean, pvariance

import torch

from checked_backend.checking.compare_runs import compare_errors, compare_structure
from checked_backend.checking.program import Outcome, Program, ProgramCopy, Stopwatch, Transform
from checked_backend.findings import Finding, Kind, Skip
from checked_backend.report.ledger import Ledger
from checked_backend.subjects import Subject, SubjectKind

RUNS = 20
"""How many runs of each side there are, from seeds of their own."""

MOST_SECONDS = 20.0
"""Seconds that the runs may take."""

STANDARD_ERRORS = 8.0
"""Shares of zeros that differ by more are of other distributions: by chance once in a thousand million checks."""

_HOW = "with the compiler's own random operators, as without a check (fallback_random=False)"
_SUBJECT = "the compiler's own random operators"


@dataclass(slots=True)
class _Samples:
    """One side's results, from seed to seed.

    Attributes:
        means: By tensor, its mean in each run.
        zeros: By tensor, the share of its elements that are zero.
        alike: For a gradient and a result, in how many runs they are zero at the same places.
    """

    means: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    zeros: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    alike: Counter[tuple[str, str]] = field(default_factory=Counter)

    def add(self, tensors: Mapping[str, torch.Tensor]) -> None:
        masks: dict[str, torch.Tensor] = {}
        for name, tensor in tensors.items():
            if tensor.layout is torch.strided and not tensor.is_complex() and not tensor.is_meta and tensor.numel():
                numbers = tensor.detach().to("cpu", torch.float64).reshape(-1)
                masks[name] = numbers == 0
                self.means[name].append(float(numbers.nan_to_num(0.0, 0.0, 0.0).mean()))
                self.zeros[name].append(float(masks[name].double().mean()))
        results = [name for name in masks if Subject(name).kind is SubjectKind.OUTPUT]
        for gradient in (name for name in masks if Subject(name).is_gradient):
            for result in results:
                both = masks[gradient], masks[result]
                if both[0].any() and not both[0].all() and torch.equal(*both):
                    self.alike[gradient, result] += 1


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
    samples, watch = (_Samples(), _Samples()), Stopwatch()
    for number in range(RUNS):
        for side, drawn in zip(sides, samples, strict=True):
            outcome = seeded(side)
            drawn.add(outcome.values)
            outcome.release()
        if watch.seconds() / (number + 1) * RUNS > MOST_SECONDS:
            ledger.skip(Skip(_SUBJECT, f"structure alone was compared: {RUNS} runs would take too long"))
            return []
    ledger.count({"runs with the compiler's own random numbers": RUNS})
    first: dict[str, Finding] = {}
    for finding in _different(*samples):
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


def _different(eager: _Samples, compiled: _Samples) -> Iterator[Finding]:
    """Findings about what differs more than by chance; a tensor may have several."""
    for name, means in eager.means.items():
        if len({*means}) == RUNS and len({*compiled.means[name]}) == 1:
            message = f"{_HOW} it is the same from every seed"
            yield _finding(name, "rng.seed", message, "another one each time", "the same each time")
    for (name, result), runs in eager.alike.items():
        if runs == RUNS > (theirs := compiled.alike[name, result]):
            message = (
                f"{result} and {name} are zero at the same places in eager, and not {_HOW}: the backward pass drops "
                "other elements than the forward pass"
            )
            there = f"zero where {result} is, in {RUNS} of {RUNS} runs"
            yield _finding(name, "rng.mask", message, there, f"in {theirs} of {RUNS}")
    for name, mine in eager.zeros.items():
        other = compiled.zeros[name]
        error = math.sqrt((pvariance(mine) + pvariance(other)) / RUNS)
        if len(other) == RUNS and len({*mine}) > 1 and abs(fmean(mine) - fmean(other)) > STANDARD_ERRORS * error:
            message = (
                f"{_HOW} its share of zeros is another one than eager's: over {RUNS} runs of each, from other "
                f"seeds, by more than {STANDARD_ERRORS:g} standard errors"
            )
            yield _finding(name, "rng.distribution", message, _range(mine), _range(other))


def _finding(subject: str, detail: str, message: str, expected: str, actual: str) -> Finding:
    found = Finding(Kind.RNG, subject, message, detail, expected=expected, actual=actual)
    return replace(found, stage="compiled", searched=True)


def _range(values: list[float]) -> str:
    return f"{min(values):.4g} to {max(values):.4g}, on the average {fmean(values):.4g}"
