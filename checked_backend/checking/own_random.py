"""Compare a program that draws with the compiler's own random operators, which users get by default.

A check compiles with eager's random operators, so that both sides draw the same numbers. Inductor's own operators are
other code. Their results are compared in structure, and over many runs from other seeds in what dropout makes: how many
elements are zero, and whether the backward pass drops those that the forward pass dropped.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count, product
from statistics import fmean, pvariance
from typing import NamedTuple

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


def compare_own_random(program: Program, transform: Transform, ledger: Ledger) -> list[Finding]:
    """Compare a program that draws random numbers with the same program compiled to draw its own."""
    made = replace(program, calls=program.calls[:1], continued=False, optimizer=None)
    sides = ProgramCopy(made), ProgramCopy(made, transform)
    seeds = count(1)

    def seeded(side: ProgramCopy) -> Outcome:
        side.rng = program.rng.reseeded(next(seeds))
        return side.step(0, program.calls[0])

    reference, candidate = map(seeded, sides)
    findings = _structure(reference, candidate, seeded(sides[0]))
    if findings or reference.error is not None or reference.backward_error is not None:
        ledger.count({"runs with the compiler's own random numbers": 1})
        return findings
    samples: list[tuple[_Sample, _Sample]] = []
    watch = Stopwatch()
    while len(samples) < RUNS:
        samples.append((_sample(seeded(sides[0])), _sample(seeded(sides[1]))))
        if watch.seconds() / len(samples) * RUNS > MOST_SECONDS:
            ledger.skip(Skip(_SUBJECT, f"structure alone was compared: {RUNS} runs would take too long"))
            return []
    ledger.count({"runs with the compiler's own random numbers": RUNS})
    found = (finding for name in samples[0][0].means for finding in _different(name, samples))
    return list({finding.subject: finding for finding in reversed([*found])}.values())


def _structure(reference: Outcome, candidate: Outcome, again: Outcome) -> list[Finding]:
    """Findings about structure, without aspects that differ between two runs of eager: shapes may depend on draws."""
    ledger = Ledger()
    if any(outcome.error or outcome.backward_error for outcome in (reference, candidate, again)):
        found = []
        if not (again.error or again.backward_error):
            backward = not (reference.error or candidate.error)
            found = list(compare_errors(reference, candidate, ledger, backward=backward))
    else:
        itself = {(each.detail, each.subject) for each in compare_structure(reference, again, ledger)[0]}
        found = compare_structure(reference, candidate, ledger)[0]
        found = [each for each in found if (each.detail, each.subject) not in itself]
    return [replace(each, stage="compiled", searched=True, message=f"{each.message}, {_HOW}") for each in found]


class _Sample(NamedTuple):
    """One run: of each tensor the mean and the share of zeros, and gradients that are zero where a result is."""

    means: dict[str, float]
    zeros: dict[str, float]
    masked: set[tuple[str, str]]


def _sample(outcome: Outcome) -> _Sample:
    numbers = {
        name: tensor.detach().to("cpu", torch.float64).reshape(-1)
        for name, tensor in outcome.values.items()
        if tensor.layout is torch.strided and not tensor.is_complex() and not tensor.is_meta and tensor.numel()
    }
    outcome.release()
    masks = {name: values == 0 for name, values in numbers.items()}
    means = {name: float(values.nan_to_num(0.0, 0.0, 0.0).mean()) for name, values in numbers.items()}
    zeros = {name: float(mask.double().mean()) for name, mask in masks.items()}
    masked = {
        (gradient, result)
        for gradient, result in product(masks, masks)
        if Subject(gradient).is_gradient and Subject(result).kind is SubjectKind.OUTPUT
        if 0 < zeros[gradient] < 1 and torch.equal(masks[gradient], masks[result])
    }
    return _Sample(means, zeros, masked)


def _different(name: str, samples: Sequence[tuple[_Sample, _Sample]]) -> Iterator[Finding]:
    """Findings about what differs in a tensor by more than chance."""
    if not all(name in sample.means for pair in samples for sample in pair):
        return  # what is drawn decides whether there is such a tensor
    eager, compiled = ([pair[side].means[name] for pair in samples] for side in (0, 1))
    if len({*eager}) == RUNS and len({*compiled}) == 1:
        message = f"{_HOW} it is the same from every seed"
        yield _finding(name, "rng.seed", message, "another one each time", "the same each time")
    for gradient, result in set.intersection(*(pair[0].masked for pair in samples)):
        alike = sum((gradient, result) in pair[1].masked for pair in samples)
        if gradient == name and alike < RUNS:
            message = (
                f"{result} and {name} are zero at the same places in eager, and not {_HOW}: the backward pass drops "
                "other elements than the forward pass"
            )
            yield _finding(name, "rng.mask", message, f"in {RUNS} of {RUNS} runs", f"in {alike} of {RUNS}")
    mine, theirs = ([pair[side].zeros[name] for pair in samples] for side in (0, 1))
    error = math.sqrt((pvariance(mine) + pvariance(theirs)) / RUNS)
    if len({*mine}) > 1 and abs(fmean(mine) - fmean(theirs)) > STANDARD_ERRORS * error:
        message = (
            f"{_HOW} its share of zeros is another one than eager's: over {RUNS} runs of each, from other seeds, by "
            f"more than {STANDARD_ERRORS:g} standard errors"
        )
        yield _finding(name, "rng.distribution", message, _range(mine), _range(theirs))


def _finding(subject: str, detail: str, message: str, expected: str, actual: str) -> Finding:
    return Finding(
        Kind.RNG, subject, message, detail, expected=expected, actual=actual, stage="compiled", searched=True
    )


def _range(values: list[float]) -> str:
    return f"{min(values):.4g} to {max(values):.4g}, on the average {fmean(values):.4g}"
