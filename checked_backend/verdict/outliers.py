"""The rules that find elements which noise does not explain. Each is written so that NaN fails.

The constants (`thresholds`) come from the calibration program: ``python -m tests.calibration`` prints, for each dtype,
the worst clean case and the smallest bug that was caught, in units of what is allowed here. The numbers in `thresholds`
are from torch 2.13 on the CPU: 882 clean cases and 624 planted bugs of 39 families, in float32 and bfloat16, for
inference and training. No clean case was called wrong, and all 595 bugs above the noise were caught. Other values were
tried on the 24 cases nearest to a change of verdict (``python -m tests.calibration.constants``). At a quarter of its
value and at four times its value no constant changes a verdict, except `STRONG_MAGNITUDE`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from checked_backend.numerics.bits import unit_roundoff
from checked_backend.verdict import thresholds
from checked_backend.verdict.digits import least_digits, lost_digits
from checked_backend.verdict.envelope import (
    Envelope,
    difference,
    local_root_mean_square,
    root_mean_square,
    unconfirmed,
    widened,
)
from checked_backend.verdict.flips import as_rare_as_jumps, as_rare_as_unstable

__all__ = [
    "Closeness",
    "Outliers",
    "TwinDifference",
    "as_good_as_eager",
    "distances_from",
    "outside_noise",
    "twin_difference",
]


@dataclass(frozen=True, slots=True)
class Outliers:
    """Elements of a candidate that noise does not explain.

    Attributes:
        count: How many there are.
        nonfinite: How many of them are NaN or infinite on one side only.
        worst: Greatest ratio of a difference to what was allowed, over all elements (inf for the nonfinite ones). With
            a float64 reference or a strong envelope, elements that are not outside count as 0.
        largest: Greatest magnitude among them (float64's, if it is known), which may be infinite.
        digits: How many of them are beyond their own noise only, and have lost their digits.
        doubtful: How many elements are not outside, but beyond their own noise and so far from eager that they may
            have lost their digits. Only a float64 reference can tell; with one this is 0.
        overflowed: How many of them are numbers, if wrong ones, where eager has NaN or infinity. Counted only if the
            program leaves its dtype's range on the way: eager has NaN or infinity somewhere, where float64 has a
            number within that range. There is nothing to compare these elements with.
        unconfirmed: For how many of them eager has a number and float64 has none, so that float64 cannot tell which
            side is wrong.
    """

    count: int
    nonfinite: int
    worst: float
    largest: float = float("inf")
    digits: int = 0
    doubtful: int = 0
    overflowed: int = 0
    unconfirmed: int = 0

    def __bool__(self) -> bool:
        return self.count > 0


def outside_noise(
    *,
    reference: torch.Tensor,
    candidate: torch.Tensor,
    envelope: Envelope,
    high_precision: torch.Tensor | None = None,
    strong: Envelope | None = None,
) -> Outliers:
    """Find the elements that differ by more than the program's noise.

    An element is inside if one of these holds:

    - Its difference is within `ENVELOPE_FACTOR` envelopes plus one rounding of the result. The envelope is its own, or
      the root mean square of those of the elements that are not much larger, whichever is greater.
    - Eager is as far from float64 there (up to `EAGER_FACTOR`).
    - Eager has NaN or infinity where float64 has a number, and the candidate has NaN or infinity too, or is right.

    Where float64 has NaN or infinity and eager has a number, float64 is not asked. An element that has lost its digits
    must be within its own envelope: the typical error is that of larger elements. Integers have no typical error: an
    integer that no control run changed is right or wrong.

    Args:
        reference: Eager's tensor.
        candidate: The compiled program's, of the same dtype and shape.
        envelope: The noise from control runs.
        high_precision: The reference in float64, if it could be run.
        strong: The noise from control runs with roundings of `STRONG_MAGNITUDE`, where ``envelope`` is from runs with
            `CORRELATED_MAGNITUDE`. It counts where it is out of proportion, because a comparison or a rounding flips
            there. Elsewhere it says no more than ``envelope`` does.
    """
    distance = difference(reference, candidate)
    magnitude = difference(reference, torch.zeros_like(reference)).nan_to_num_(posinf=0.0)
    allowed, own, jumps = _allowances(reference.dtype, magnitude, envelope, strong)
    inside = distance <= allowed
    for runs in (envelope, strong):
        if runs is not None and runs.unstable is not None:  # there NaN and infinity are as good as a number
            inside |= runs.unstable & distance.isinf()
    digits, lost, blind = None, None, None
    if high_precision is not None:
        eager, compiled = distances_from(high_precision, reference), distances_from(high_precision, candidate)
        blind = unconfirmed(reference, high_precision)
        lost = eager.isinf() if blind is None else eager.isinf() & ~blind
        inside |= eager.isfinite() & (compiled <= thresholds.EAGER_FACTOR * eager)
        without = compiled.isinf() & ~_finite(candidate)
        inside |= lost & (without | _has_digits(compiled, high_precision, reference.dtype))
        digits = lost_digits(reference=reference, candidate=candidate, high_precision=high_precision)
    if not distance.numel():
        return Outliers(0, 0, 0.0)
    outside = ~inside
    if digits is not None:
        digits &= (distance > own) & inside
        outside |= digits
    doubtful = 0
    if high_precision is None and reference.dtype.is_floating_point:
        apart = (distance > own) & inside & (distance > least_digits(reference.dtype) * magnitude)
        doubtful = int((apart & (magnitude >= torch.finfo(reference.dtype).tiny)).sum().item())
    if jumps is not None and as_rare_as_jumps(outside, jumps, distance, strong):
        outside = torch.zeros_like(outside)
    if strong is not None:
        known = widened(reference if high_precision is None else high_precision)
        known = torch.where(known.isfinite(), known, widened(candidate))
        outside &= ~as_rare_as_unstable(outside & distance.isinf(), (envelope, strong), known)
    ratios = torch.where(distance == 0, 0.0, distance / allowed.clamp_min(torch.finfo(torch.float32).tiny))
    if high_precision is not None or jumps is not None:
        ratios = torch.where(outside, ratios, 0.0)
    nonfinite = int((outside & distance.isinf()).sum().item())
    return Outliers(
        int(outside.sum().item()),
        nonfinite,
        float(ratios.nan_to_num(nan=torch.inf).max().item()),
        _greatest(reference if high_precision is None else high_precision, outside),
        0 if digits is None else int((digits & outside).sum().item()),
        doubtful,
        0 if lost is None or not bool(lost.any()) else _numbers_for_none(outside, reference, candidate),
        0 if blind is None else int((outside & blind).sum().item()),
    )


def _numbers_for_none(where: torch.Tensor, reference: torch.Tensor, candidate: torch.Tensor) -> int:
    return int((where & ~_finite(reference) & _finite(candidate)).sum().item())


def _finite(tensor: torch.Tensor) -> torch.Tensor:
    wide = widened(tensor)  # both parts of a complex number are elements here
    return wide.isfinite()


def _allowances(
    dtype: torch.dtype, magnitude: torch.Tensor, envelope: Envelope, strong: Envelope | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """How far each element may lie from eager's, how far by its own noise alone, and which elements jump."""
    typical = envelope.values
    if dtype.is_floating_point or dtype.is_complex:
        typical = local_root_mean_square(envelope.values, magnitude).to(envelope.values.dtype)
    rounding = 2 * thresholds.EXACT_ROUNDOFFS * unit_roundoff(dtype) * magnitude + _nothing(dtype)
    allowed = thresholds.ENVELOPE_FACTOR * torch.maximum(envelope.values, typical) + rounding
    own = thresholds.ENVELOPE_FACTOR * envelope.values + rounding
    if strong is None:
        return allowed, own, None
    proportion = thresholds.OUT_OF_PROPORTION * thresholds.STRONG_MAGNITUDE / thresholds.CORRELATED_MAGNITUDE
    jumps = strong.values > proportion * envelope.values
    allowed = torch.where(jumps, torch.maximum(allowed, thresholds.STRONG_FACTOR * strong.values), allowed)
    own = torch.where(jumps, torch.maximum(own, thresholds.STRONG_FACTOR * strong.values), own)
    return allowed, own, jumps


def _nothing(dtype: torch.dtype) -> float:
    """The magnitude that counts as zero: a dtype's least normal number, because some processors flush subnormal ones.

    No processor flushes the subnormal numbers of float16, which begin at 6e-5. There it is the step between them.
    """
    if not (dtype.is_floating_point or dtype.is_complex):
        return 0.0
    limits = torch.finfo(dtype)
    return limits.tiny if limits.tiny < thresholds.SUBNORMAL else limits.tiny * limits.eps


def _greatest(values: torch.Tensor, where: torch.Tensor) -> float:
    sizes = difference(values, torch.zeros_like(values))[where]
    return float(sizes.max().item()) if sizes.numel() else 0.0


def distances_from(high_precision: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """How far a tensor lies from the float64 result, element by element.

    Whether an element is finite is decided at the tensor's own precision: a float64 value beyond float16's range is
    infinite there.
    """
    rounded = high_precision.to(tensor.dtype)
    distance = difference(high_precision, tensor)
    if not (tensor.dtype.is_floating_point or tensor.dtype.is_complex) or bool(distance.isfinite().all()):
        return distance
    return torch.where(distance.isinf(), difference(rounded, tensor).to(distance.dtype), distance)


@dataclass(frozen=True, slots=True)
class Closeness:
    """Distances from float64.

    Attributes:
        as_good: Whether the candidate is no further from float64 than eager, up to `EAGER_FACTOR`.
        eager: Eager's distance, root mean square.
        candidate: The candidate's.
        ratio: The greater of two ratios of the candidate's distance to eager's: of the root mean squares, and of the
            greatest elements (inf if only the candidate has NaN or infinities somewhere).
    """

    as_good: bool
    eager: float
    candidate: float
    ratio: float


def as_good_as_eager(
    *,
    reference: torch.Tensor,
    candidate: torch.Tensor,
    high_precision: torch.Tensor,
    up_to: float = float("inf"),
) -> Closeness:
    """Compare the candidate's distance from float64 with eager's.

    Args:
        reference: Eager's tensor.
        high_precision: The reference in float64.
        up_to: Larger elements are left out: their rounding explains no error in smaller ones.
    """
    eager = distances_from(high_precision, reference)
    compiled = distances_from(high_precision, candidate)
    size = difference(high_precision, torch.zeros_like(high_precision))
    if up_to < float("inf"):
        eager, compiled = (torch.where(size <= up_to, distance, 0.0) for distance in (eager, compiled))
    eager_rms, compiled_rms = root_mean_square(eager), root_mean_square(compiled)
    wrong = compiled.isinf() & ~eager.isinf()
    wrong |= eager.isinf() & compiled.isfinite() & ~_has_digits(compiled, high_precision, reference.dtype)
    nowhere_worse = not bool(wrong.any())
    finite = eager.isfinite() & compiled.isfinite()
    greatest = (eager[finite].max().item(), compiled[finite].max().item()) if bool(finite.any()) else (0.0, 0.0)
    ratio = max(_ratio(compiled_rms, eager_rms), _ratio(greatest[1], greatest[0])) if nowhere_worse else float("inf")
    return Closeness(ratio <= thresholds.EAGER_FACTOR, eager_rms, compiled_rms, ratio)


def _has_digits(distance: torch.Tensor, high_precision: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Whether half of an element's digits are right, compared with float64 and with other elements of its size."""
    if not (dtype.is_floating_point or dtype.is_complex):
        return distance == 0
    size = difference(high_precision, torch.zeros_like(high_precision))
    half = float(torch.finfo(dtype).eps) ** 0.5
    allowed = half * (size + local_root_mean_square(size, size)).nan_to_num_(posinf=0.0)
    near: torch.Tensor = distance <= allowed
    return near


def _ratio(part: float, whole: float) -> float:
    if not part:
        return 0.0
    return part / whole if whole else float("inf")


@dataclass(frozen=True, slots=True)
class TwinDifference:
    """How the candidate compiled in float64 differs from the reference in float64.

    Attributes:
        differs: Whether only different logic can explain that.
        relative: Greatest difference over the tensor's root mean square.
        ratio: Greatest ratio of a difference to what was allowed.
        equal: Whether no element differs, so that no noise had to be allowed.
    """

    differs: bool
    relative: float
    ratio: float
    equal: bool = False


def twin_difference(
    *,
    high_precision: torch.Tensor,
    twin: torch.Tensor,
    envelope: Envelope | None,
    further: Envelope | None = None,
    blind: torch.Tensor | None = None,
) -> TwinDifference:
    """Compare the candidate compiled in float64 with the reference in float64.

    Args:
        high_precision: The reference in float64.
        twin: The candidate compiled in float64.
        envelope: Noise of the float64 reference at float64's roundoff; None if it could not be had.
        further: Noise from more runs, in which choices may flip. It counts only for elements that jump.
        blind: Elements about which float64 says nothing: those that `unconfirmed` finds.
    """
    distance = difference(high_precision, twin).to(torch.float64)
    if blind is not None:
        distance = torch.where(blind, 0.0, distance)
    if not distance.numel():
        return TwinDifference(False, 0.0, 0.0, equal=True)
    equal = not bool(distance.any())
    scale = root_mean_square(high_precision)
    magnitude = difference(high_precision, torch.zeros_like(high_precision)).to(torch.float64).nan_to_num_(posinf=0.0)
    allowed = thresholds.TWIN_TOLERANCE * (magnitude + local_root_mean_square(magnitude, magnitude))
    allowed = allowed + torch.finfo(torch.float64).tiny  # where numbers are subnormal nothing is relative
    allowed = allowed + 2.0**-thresholds.CANCELLED_REST_BITS * local_root_mean_square(
        magnitude, magnitude, thresholds.CANCELLED_BITS
    )
    if envelope is not None:
        noise = envelope.values.to(torch.float64)
        allowed = allowed + thresholds.TWIN_ENVELOPE_FACTOR * torch.maximum(
            noise, local_root_mean_square(noise, magnitude)
        )
    for runs in (envelope, further):
        if runs is not None and runs.unstable is not None:
            distance = torch.where(runs.unstable & distance.isinf(), 0.0, distance)
            known = widened(high_precision)
            known = torch.where(known.isfinite(), known, widened(twin))
            distance = torch.where(as_rare_as_unstable(distance.isinf(), (runs,), known), 0.0, distance)
    if further is not None:
        jumps = further.values > allowed
        allowed = torch.where(jumps, thresholds.STRONG_FACTOR * further.values.to(torch.float64), allowed)
        outside = ~(distance <= allowed)
        if as_rare_as_jumps(outside, jumps, distance, further):
            distance = torch.where(outside, 0.0, distance)
    differs = not bool((distance <= allowed).all())
    ratios = torch.where(distance == 0, 0.0, distance / allowed.clamp_min(torch.finfo(torch.float64).tiny))
    finite = distance[distance.isfinite()]
    greatest = float((finite if finite.numel() else distance).max().item())
    return TwinDifference(
        differs, greatest / scale if scale else greatest, float(ratios.nan_to_num(nan=torch.inf).max().item()), equal
    )
