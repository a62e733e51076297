"""The step of float64: a reference with hardly any rounding, and a twin of the candidate with hardly any.

In float64 a difference is a difference of logic, and a value that does not repeat is not explained by rounding.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from checked_backend.findings import EvidenceKey
from checked_backend.verdict import thresholds
from checked_backend.verdict.elements import (
    LocalScale,
    all_finite,
    difference,
    magnitudes,
    root_mean_square,
    unconfirmed,
    widened,
)
from checked_backend.verdict.envelope import Envelope
from checked_backend.verdict.evidence import Context, Evidence
from checked_backend.verdict.outliers import Allowances, Allowed, Elements, outside_noise
from checked_backend.verdict.runner import FLOAT64, Build, Control, Recipe, Runs
from checked_backend.verdict.steps.noise import compare_with_noise, perturb

TWIN = Recipe(Control.TWIN, Build.TWIN, replays_draws=True, float64=True)
FIRST_SEEDS = range(1, 1 + thresholds.FEW_RUNS)
"""Seeds of the first perturbed runs in float64."""


def ask_float64(context: Context) -> None:
    """Ask float64 about differences outside of the noise, and about errors that the noise may hide."""
    outside = [case for case in context.open() if case.outside]
    spread = [case for case in context.open() if case.spreads]
    hidden = [case for case in context.open() if case.outside.doubtful or context.wants_twin(case)]
    asked = [case for case in context.open() if case in (*outside, *spread, *hidden)]
    if not asked or not _run_high_precision(asked, context.runs):
        return
    compare_with_noise(asked)
    perturb(spread, context.runs, FIRST_SEEDS, float64=True)
    doubtful = [case for case in asked if case in outside or case.outside or context.wants_twin(case)]
    if doubtful:
        _hold_against_twin(doubtful, context.runs, context.decisions.notes)


def _run_high_precision(cases: Sequence[Evidence], runs: Runs) -> bool:
    """Give each case eager's float64 result. Return whether the run could be made."""
    high = runs.run(FLOAT64)
    if high is None:
        return False
    for case in cases:
        case.high_precision = case.sample_in_float64(high)
        if case.high_precision is not None:
            case.float64_nonfinite = unconfirmed(case.pair.reference, case.high_precision)
    return True


def _hold_against_twin(cases: Sequence[Evidence], runs: Runs, notes: list[str]) -> None:
    """Find the cases whose float64 twin computes something else than eager in float64.

    Raises:
        PostponedError: The twin has not been earned yet, and no case is outside of its noise.
    """
    urgent = any(case.outside for case in cases)
    twin = runs.run(replace(TWIN, urgent=urgent))
    if twin is None:
        return
    for case in cases:
        found = case.sample_in_float64(twin)
        case.twin = None if case.high_precision is None else found
        if found is None:
            notes.append(f"{case.pair.subject}: compiled in float64 it has another shape, so the twin was not used")
    compared = [case for case in cases if case.twin is not None]
    _compare(compared)
    differing = [case for case in compared if case.logic_differs]
    if differing:  # perhaps by no more than the noise of an ill-conditioned program
        perturb(differing, runs, FIRST_SEEDS, keeps_choices=True, float64=True)
        _compare(differing)
        differing = [case for case in differing if case.logic_differs]
    if differing:  # an element that jumps in float64 (a tie, a rounding) may not jump in the first few runs
        further = range(FIRST_SEEDS.stop, FIRST_SEEDS.stop + thresholds.MORE_RUNS)
        perturb(differing, runs, further, thresholds.STRONG_MAGNITUDE, float64=True)
        _compare(differing)
        flips = True in runs.runner.facts.flips
        jumping = [case for case in differing if case.logic_differs and (flips or _flips_to_nan(case))]
        if jumping:  # a choice that flips in the twin and never flipped in these runs would look like wrong logic
            further = range(100, 100 + 2 * thresholds.MORE_RUNS)
            perturb(jumping, runs, further, thresholds.STRONG_MAGNITUDE, float64=True)
            _compare(jumping)
    differing = [case for case in differing if case.logic_differs and not case.outside]
    if any(case.envelope is None for case in differing):
        perturb(differing, runs, range(thresholds.FIRST_RUNS))
    for case in differing:
        _let_candidate_answer(case, notes)


def _flips_to_nan(case: Evidence) -> bool:
    """Whether rounding in float64 makes the difference between a number and NaN or infinity somewhere."""
    return case.float64_envelope_large is not None and case.float64_envelope_large.unstable is not None


def _compare(cases: Iterable[Evidence]) -> None:
    for case in cases:
        if case.high_precision is None or case.twin is None:
            continue
        found = twin_difference(
            high_precision=case.high_precision,
            twin=case.twin,
            envelope=case.float64_envelope,
            further=case.float64_envelope_large,
            float64_nonfinite=case.float64_nonfinite,
        )
        if case.float64_says_nothing:
            case.evidence[EvidenceKey.TWIN] = "says nothing: float64 has NaN or infinity wherever eager has a number"
            continue
        case.logic_differs = found.differs
        case.evidence[EvidenceKey.TWIN_ERROR] = found.relative


def _let_candidate_answer(case: Evidence, notes: list[str]) -> None:
    """Ignore a twin whose error would be seen in the candidate, if the candidate had it.

    Such a twin is wrong in float64 only. It is another program than the candidate (float64 has a kernel or a
    decomposition of its own), and says nothing about the candidate.
    """
    if case.envelope is None or case.twin is None:
        return
    if case.outliers(case.twin.to(case.pair.reference.dtype), strong=False).worst > thresholds.TWIN_WOULD_SHOW:
        case.logic_differs = None
        notes.append(
            f"{case.pair.subject}: compiled in float64 the region is wrong where it is right at its own precision, so "
            "the float64 twin was not used"
        )


@dataclass(frozen=True, slots=True)
class TwinDifference:
    """How the candidate compiled in float64 differs from the reference in float64.

    Attributes:
        differs: Whether only different logic can explain that.
        relative: Greatest difference over the tensor's root mean square.
        ratio: Greatest ratio of a difference to what was allowed; with further runs, of one that is not allowed.
    """

    differs: bool
    relative: float
    ratio: float


def twin_difference(
    *,
    high_precision: torch.Tensor,
    twin: torch.Tensor,
    envelope: Envelope | None,
    further: Envelope | None = None,
    float64_nonfinite: torch.Tensor | None = None,
) -> TwinDifference:
    """Compare the candidate compiled in float64 with the reference in float64.

    Args:
        envelope: Noise of the float64 reference at float64's roundoff; None if it could not be had.
        further: Noise from more runs, in which choices may flip. It counts only for elements that jump.
        float64_nonfinite: Elements about which float64 says nothing: those that `unconfirmed` finds.
    """
    if float64_nonfinite is not None:
        high_precision, twin = widened(high_precision), widened(twin)
        twin = torch.where(float64_nonfinite, high_precision, twin)
    distance = difference(high_precision, twin)
    found = outside_noise(
        reference=high_precision,
        candidate=twin,
        envelope=Envelope(distance.new_zeros(()).expand_as(distance)) if envelope is None else envelope,
        strong=further,
        allowances=_by_twin(high_precision, envelope),
    )
    finite = distance if all_finite(distance) else distance[distance.isfinite()]
    distances = finite if finite.numel() else distance
    greatest = float(distances.max()) if distances.numel() else 0.0
    relative = greatest / (root_mean_square(high_precision) or 1.0)
    return TwinDifference(bool(found), relative, found.worst)


def _by_twin(high_precision: torch.Tensor, envelope: Envelope | None) -> Allowances:
    """How far elements of the float64 twin may lie from those of the whole float64 reference."""
    sizes = LocalScale.of_sizes(high_precision)
    scale = None if envelope is None else envelope.scale(high_precision)

    def allowed_of(part: Elements) -> Allowed:
        magnitude = magnitudes(part.reference).to(torch.float64)
        allowed = thresholds.TWIN_TOLERANCE * (magnitude + sizes.at(magnitude))
        allowed += torch.finfo(torch.float64).tiny  # where numbers are subnormal nothing is relative
        allowed += 2.0**-thresholds.CANCELLED_REST_BITS * sizes.at(magnitude, thresholds.CANCELLED_BITS)
        if scale is not None:
            noise = torch.maximum(part.noise.to(torch.float64), scale.at(magnitude))
            allowed += thresholds.TWIN_ENVELOPE_FACTOR * noise
        if part.strong is None:
            return Allowed(allowed)
        jumps = part.strong > allowed
        allowed = torch.where(jumps, thresholds.DRAW_FACTOR * part.strong.to(torch.float64), allowed)
        return Allowed(allowed, jumps=jumps)

    return allowed_of
