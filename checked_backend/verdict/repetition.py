"""Does eager differ from run to run, and is that rounding?

Sums without a fixed order differ by rounding, and float64 makes rounding as much smaller as it has more digits. A
program that reads a clock, random bytes or uninitialised memory differs by as much in float64. Its spread is no noise
that could explain a difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from checked_backend.findings import EvidenceKey
from checked_backend.numerics.bits import is_floating
from checked_backend.verdict import thresholds
from checked_backend.verdict.control_runner import ControlRunner
from checked_backend.verdict.control_runs import Control, Values
from checked_backend.verdict.elements import difference, root_mean_square
from checked_backend.verdict.evidence import Evidence

__all__ = ["Repetition", "dwarfs", "is_rounding", "repeat", "spreads"]


@dataclass(frozen=True, slots=True)
class Repetition:
    """The results of running eager again.

    Attributes:
        values: Its values; None if it could not be run.
        only_as_it_is: Names of tensors that eager repeats bit for bit if it is left as it is, but not in control runs,
            which fill uninitialised memory with junk.
    """

    values: Values | None
    only_as_it_is: frozenset[str] = frozenset()


def repeat(cases: Sequence[Evidence], runs: ControlRunner) -> Repetition:
    """Run eager again, and where the result differs find out what changes: eager, or torch under a dispatch mode.

    Control runs need a dispatch mode. While one is active, torch itself computes some things otherwise (the gradient of
    ``prod``, singular values). That is no change of eager's: such a tensor gets eager's result without a mode.
    """
    recorded = runs.run(Control.REPEAT, runs.controls.repeat)
    unlike = [case for case in cases if recorded is not None and _differs(case, case.pair.reference, recorded)]
    bare = runs.run(Control.BARE, runs.controls.bare) if unlike else None
    steady = [case for case in unlike if bare is not None and not _differs(case, case.pair.reference, bare)]
    other = runs.run(Control.REPEAT, partial(runs.controls.repeat, 2)) if steady else None
    by_junk = set[str]()
    for case in unlike:
        found = None if recorded is None else case.sample(recorded)
        if case in steady and recorded is not None and bare is not None:
            if found is not None and other is not None and not _differs(case, found, other):
                recorded[case.pair.name] = bare[case.pair.name]
                continue
            by_junk.add(case.pair.name)
        if found is not None:
            case.spread = root_mean_square(difference(case.pair.reference, found))
    return Repetition(recorded, frozenset(by_junk))


def _differs(case: Evidence, one: torch.Tensor, values: Values) -> bool:
    other = case.sample(values)
    if other is not None and other.dtype == one.dtype and torch.equal(other, one):
        return False
    return other is None or bool((difference(one, other) != 0).any())


def spreads(case: Evidence) -> bool:
    """Whether two runs of eager differ by more than a rounding or two; in integers, whether they differ."""
    least = 0.0
    if is_floating(case.pair.reference):
        least = thresholds.SPREAD_ROUNDOFFS * torch.finfo(case.pair.reference.dtype).eps * case.metrics.reference_rms
    return case.spread > least


def is_rounding(case: Evidence) -> bool:
    """Whether rounding explains that eager differs from run to run, or eager does not differ. Float64 decides.

    Args:
        case: A tensor that differs from the candidate's. If the spread is not rounding, the case takes note of it, and
            of that in float64.
    """
    if not spreads(case) or (is_floating(case.pair.reference) and case.float64_repeats):
        return True
    double = case.pair.reference.dtype in (torch.float64, torch.complex128)
    in_float64 = None if case.float64_envelope is None else case.float64_envelope.rms
    if in_float64 is not None and not double and in_float64 <= thresholds.ROUNDING_SHRINKS * case.spread:
        return True
    case.evidence[EvidenceKey.EAGER_SPREAD] = case.spread
    case.evidence[EvidenceKey.NOISE_IN_FLOAT64] = "could not be found out" if in_float64 is None else in_float64
    return False


def dwarfs(case: Evidence, repeated: Values, runs: ControlRunner) -> bool:
    """Whether eager's own spread is far too small to explain how far the candidate is from eager.

    Args:
        case: A tensor that differs from the candidate's.
        repeated: A second run of eager.
        runs: Makes further runs of eager.
    """
    found = difference(case.pair.reference, case.pair.candidate)
    spread = torch.zeros_like(found)
    more = (runs.run(Control.REPEAT, runs.controls.repeat) for _ in range(thresholds.MORE_REPEATS))
    for values in (repeated, *more):
        again = None if values is None else case.sample(values)
        if again is None:
            return False
        spread = torch.maximum(spread, difference(case.pair.reference, again).to(spread.dtype))
    if bool((found.isinf() & ~spread.isinf()).any()):
        return not bool(spread.isinf().any())
    alike = found.isfinite() & spread.isfinite()
    found, spread = found[alike], spread[alike]
    if not found.numel():
        return False
    greater = root_mean_square(found) > thresholds.SPREAD_DWARFED * root_mean_square(spread)
    return greater and bool(found.max() > thresholds.SPREAD_DWARFED * spread.max())
