"""Compare a program that draws with the compiler's own random operators, which users get by default.

A check compiles with eager's random operators, so that both sides draw the same numbers. Inductor's own operators are
other code. Their results are compared in structure, and in distribution over many runs from other seeds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from random import Random

import torch

from checked_backend.checking.compare_runs import compare_errors, compare_structure
from checked_backend.checking.program import Outcome, Program, ProgramCopy, Transform
from checked_backend.checking.stopwatch import Stopwatch
from checked_backend.findings import Finding, Kind, Skip
from checked_backend.numerics.ranks import rank_sum_probability
from checked_backend.report.ledger import Ledger
from checked_backend.subjects import Subject, SubjectKind

__all__ = ["compare_own_random"]

FALSE_ALARM = 1e-9
"""The probability that one check calls a right compiler wrong because of the numbers that it drew."""

RUNS = 40
LEAST_RUNS = 20
"""The least number of runs of each side, from seeds of their own. There are as many runs as there is time for."""

MOST_SECONDS = 20.0
"""Seconds that the runs may take."""

MOST_ELEMENTS = 1 << 20
"""Elements that are compared, the first ones of larger tensors. More would show the grids of the generators."""

ROUNDING = 2.0**-8
ROUNDOFFS = 8.0
"""Differences of less than this many roundoffs of a tensor's size are not ascribed to random numbers."""

_HOW = "with the compiler's own random operators, as without a check (fallback_random=False)"
_NONFINITE = "share of NaN and infinity"
_SUBJECT = "the compiler's own random operators"


def compare_own_random(program: Program, transform: Transform, ledger: Ledger) -> list[Finding]:
    """Compare a program that draws random numbers with the same program compiled to draw its own.

    Args:
        transform: Compiles a function so.
        ledger: Where counts and skips go.

    Returns:
        The findings.
    """
    made = replace(program, calls=program.calls[:1], continued=False, optimizer=None)
    sides = ProgramCopy(made), ProgramCopy(made, transform)
    seeds = iter(range(1, 10**6))

    def pair() -> tuple[Outcome, Outcome]:
        return _seeded(sides[0], made, next(seeds)), _seeded(sides[1], made, next(seeds))

    reference, candidate = pair()
    findings = _structure(reference, candidate, _seeded(sides[0], made, next(seeds)), Ledger())
    if findings or reference.error is not None or reference.backward_error is not None:
        ledger.count({"runs with the compiler's own random numbers": 1})
        return findings
    watch, samples = Stopwatch(), _Samples()
    samples.add(*pair())
    affordable = int(min(RUNS, MOST_SECONDS / max(watch.seconds(), 1e-9)))
    if affordable < LEAST_RUNS:
        ledger.skip(Skip(_SUBJECT, f"structure alone was compared: {LEAST_RUNS} runs would take too long"))
        return []
    for _ in range(affordable - 1):
        samples.add(*pair())
    ledger.count({"runs with the compiler's own random numbers": affordable})
    return list(samples.findings())


def _seeded(side: ProgramCopy, program: Program, seed: int) -> Outcome:
    side.start_from(program.rng.reseeded(seed))
    return side.step(0, program.calls[0])


def _structure(reference: Outcome, candidate: Outcome, again: Outcome, ledger: Ledger) -> list[Finding]:
    """Findings about structure, without aspects that differ between two runs of eager: shapes may depend on draws."""
    errors: list[Finding] = []
    if reference.error or candidate.error:
        errors += compare_errors(reference.error, candidate.error, ledger, lambda: 0)
    elif reference.backward_error or candidate.backward_error:
        errors += compare_errors(
            reference.backward_error, candidate.backward_error, ledger, lambda: 0, during="backward"
        )
    if any(outcome.error or outcome.backward_error for outcome in (reference, candidate, again)):
        found = errors if not (again.error or again.backward_error) else []
    else:
        itself = {(found.detail, found.subject) for found in compare_structure(reference, again, ledger)[0]}
        found = [each for each in compare_structure(reference, candidate, ledger)[0] if _key(each) not in itself]
    return [replace(each, stage="compiled", searched=True, message=f"{each.message}, {_HOW}") for each in found]


def _key(finding: Finding) -> tuple[str, str]:
    return finding.detail, finding.subject


@dataclass(slots=True)
class _Samples:
    """Statistics of each tensor in every run, of eager and of the compiled program.

    Attributes:
        sizes: Root mean squares of eager's tensors.
        statistics: By tensor and name of the statistic: eager's and the compiled program's values.
        masks: By names of two tensors, the runs of each side in which both were zero at the same places.
    """

    sizes: dict[str, list[float]] = field(default_factory=dict)
    statistics: dict[tuple[str, str], tuple[list[float], list[float]]] = field(default_factory=dict)
    masks: dict[tuple[str, str], tuple[list[bool], list[bool]]] = field(default_factory=dict)
    steps: dict[str, float] = field(default_factory=dict)

    def add(self, reference: Outcome, candidate: Outcome) -> None:
        """Add the outcomes of one run of each side."""
        for side, outcome in enumerate((reference, candidate)):
            tensors = _numbers(outcome.tensors())
            for name, numbers in tensors.items():
                if side == 0:
                    self.sizes.setdefault(name, []).append(float(numbers.nan_to_num(0.0, 0.0, 0.0).square().mean()))
                for statistic, value in _statistics(numbers):
                    self.statistics.setdefault((name, statistic), ([], []))[side].append(value)
            for names, agree in _same_zeros(tensors):
                self.masks.setdefault(names, ([], []))[side].append(agree)
            for name, tensor in outcome.tensors().items():
                if tensor.is_floating_point():
                    self.steps[name] = max(ROUNDING, ROUNDOFFS * torch.finfo(tensor.dtype).eps)
            outcome.release()

    def findings(self) -> Iterator[Finding]:
        """One finding for each tensor whose distribution differs."""
        told: set[str] = set()
        for name in self.sizes:
            mine, theirs = self.statistics.get((name, "mean"), ([], []))
            if len({*mine}) == len(mine) >= LEAST_RUNS and len({*theirs}) == 1:
                told.add(name)
                message = f"{_HOW} it is the same from every seed"
                yield _found(name, "rng.seed", message, "another one each time", "the same each time")
        for (name, other), (same, same_there) in self.masks.items():
            if all(same) and not all(same_there):
                told.add(other)
                yield _found(
                    other,
                    "rng.mask",
                    f"{name} and {other} are zero at the same places in eager, and not {_HOW}: the backward pass "
                    "drops other elements than the forward pass",
                    f"zero where {name} is, in {len(same)} of {len(same)} runs",
                    f"in {sum(same_there)} of {len(same_there)} runs",
                )
        varying = {
            key: both
            for key, both in self.statistics.items()
            if len(both[0]) == len(both[1]) and (len({*both[0]}) > 1 or key[1] == _NONFINITE)
        }
        jitter = Random(1)
        for (name, statistic), (mine, theirs) in varying.items():
            step = self._step(name, statistic)
            one, other_ = ([value + jitter.uniform(-step, step) for value in values] for values in (mine, theirs))
            probability = rank_sum_probability(one, other_) * len(varying)
            if probability < FALSE_ALARM and name not in told:
                told.add(name)
                yield _found(
                    name,
                    "rng.distribution",
                    f"{_HOW} its {statistic} is another one than eager's: over {len(mine)} runs of each, from other "
                    f"seeds, so by chance with a probability of {probability:.0e}",
                    _told(mine),
                    _told(theirs),
                )

    def _step(self, name: str, statistic: str) -> float:
        """Values nearer than this are alike."""
        if statistic.startswith("share"):
            return ROUNDING / 4
        size = math.sqrt(sum(self.sizes[name]) / len(self.sizes[name]))
        step = self.steps.get(name, ROUNDING) * size
        return step * size if statistic == "product of neighbours" else step


def _found(subject: str, detail: str, message: str, expected: str, actual: str) -> Finding:
    return Finding(
        kind=Kind.RNG,
        detail=detail,
        subject=subject,
        message=message,
        expected=expected,
        actual=actual,
        stage="compiled",
        searched=True,
    )


def _told(values: list[float]) -> str:
    return f"{min(values):.4g} to {max(values):.4g}, on the average {sum(values) / len(values):.4g}"


def _numbers(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The first elements of each real tensor, in float64."""
    return {
        name: tensor.detach().reshape(-1)[:MOST_ELEMENTS].to("cpu", torch.float64)
        for name, tensor in tensors.items()
        if tensor.layout is torch.strided and not tensor.is_complex() and not tensor.is_meta and tensor.numel()
    }


def _statistics(numbers: torch.Tensor) -> Iterator[tuple[str, float]]:
    finite = numbers[numbers.isfinite()]
    yield _NONFINITE, 1 - finite.numel() / numbers.numel()
    if not finite.numel():
        return
    yield "share of zeros", float((finite == 0).double().mean())
    yield "mean", float(finite.mean())
    yield "standard deviation", float(finite.std(correction=0))
    yield "median", float(finite.median())
    yield "least element", float(finite.min())
    yield "greatest element", float(finite.max())
    if finite.numel() > 1:
        yield "product of neighbours", float((finite[1:] * finite[:-1]).mean())


def _same_zeros(tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[tuple[str, str], bool]]:
    """For each result and each gradient of one size: whether both are zero at the same places, and not everywhere."""
    zeros = {name: numbers == 0 for name, numbers in tensors.items() if numbers.numel() > 1}
    gradients = {name: mask for name, mask in zeros.items() if Subject(name).is_gradient}
    for name, mask in zeros.items():
        if name in gradients or Subject(name).kind is not SubjectKind.OUTPUT:
            continue
        for other, theirs in gradients.items():
            if mask.numel() == theirs.numel():
                yield (name, other), bool(mask.any()) and not bool(mask.all()) and torch.equal(mask, theirs)
