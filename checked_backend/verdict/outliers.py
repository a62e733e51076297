"""The rules that find elements which noise does not explain. Each is written so that NaN fails.

The constants (`thresholds`) come from the calibration program: ``python -m tests.calibration`` prints, for each dtype,
the worst clean case and the smallest bug that was caught, in units of what is allowed here. The numbers in `thresholds`
are from torch 2.13 on the CPU: 882 clean cases and 624 planted bugs of 39 families, in float32 and bfloat16, for
inference and training. No clean case was called wrong, and all 595 bugs above the noise were caught. Other values were
tried on the 24 cases nearest to a change of verdict (``python -m tests.calibration.constants``). At a quarter of its
value and at four times its value no constant changes a verdict, except `STRONG_MAGNITUDE`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch

from checked_backend.numerics.bits import unit_roundoff
from checked_backend.verdict import thresholds
from checked_backend.verdict.elements import (
    EXPONENTS,
    LocalScale,
    all_finite,
    blocks,
    difference,
    exponents,
    magnitudes,
    picked,
    root_mean_square,
    rounding,
    unconfirmed,
    widened,
)
from checked_backend.verdict.envelope import Envelope, times


@dataclass(frozen=True, slots=True)
class Outliers:
    """Elements of a candidate that noise does not explain.

    Attributes:
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
    allowances: Allowances | None = None,
    low_precision: bool = False,
) -> Outliers:
    """Find the elements that differ by more than the program's noise.

    An element is inside if one of these holds:

    - Its difference is within `ENVELOPE_FACTOR` envelopes plus one rounding of the result. The envelope is its own, or
      the root mean square of those of the elements that are not much larger, whichever is greater.
    - Eager is as far from float64 there (up to `EAGER_FACTOR`).
    - Eager has NaN or infinity where float64 has a number, and the candidate has NaN or infinity too, or is right.
    - Eager has a number where float64 is infinite, and the candidate is infinite alike.

    Elsewhere, where float64 has NaN or infinity and eager has a number, float64 is not asked. An element that has lost
    its digits must be within its own envelope: the typical error is that of larger elements. Integers have no typical
    error: an integer that no control run changed is right or wrong.

    Args:
        strong: The noise from control runs with roundings of `STRONG_MAGNITUDE`, where ``envelope`` is from runs with
            `CORRELATED_MAGNITUDE`. It counts where it is out of proportion, because a comparison or a rounding flips
            there. Elsewhere it says no more than ``envelope`` does.
        allowances: Another rule of how far elements may lie from the reference.
        low_precision: Whether eager may have left half precision's range.
    """
    digits = None
    if high_precision is not None:
        digits = lost_digits(reference=reference, candidate=candidate, high_precision=high_precision)
    whole = Elements(
        reference,
        candidate,
        envelope.values,
        envelope.unstable,
        None if strong is None else strong.values,
        None if strong is None else strong.unstable,
        high_precision,
        digits,
    )
    plain = high_precision is None and strong is None
    allowances = allowances or _by_noise(reference, envelope)
    masks: list[torch.Tensor] = []
    doubtful, worst, jumping, furthest = 0, 0.0, envelope.jumps, envelope.furthest
    for part in map(Elements._make, blocks(*whole)):  # most elements are settled here
        distance = difference(part.reference, part.candidate)
        allowed, own, jumps = allowances(part)
        inside = part.inside(distance, allowed)
        masks.append(~inside if part.digits is None else ~inside | part.digits)
        if jumps is not None and part.strong is not None and bool(jumps.any()):
            jumping, furthest = jumping + int(jumps.sum()), max(furthest, float(part.strong[jumps].max()))
        if plain:
            worst = max(worst, float(_ratios(distance, allowed).max().item()))
        if own is not None and high_precision is None and reference.dtype.is_floating_point:
            size = magnitudes(part.reference)
            apart = (distance > own) & inside & (distance > least_digits(reference.dtype) * size)
            doubtful += int((apart & (size >= torch.finfo(reference.dtype).tiny)).sum().item())
    left = torch.cat(masks) if masks else torch.zeros(0, dtype=torch.bool, device=reference.device)
    if not bool(left.any()):
        return Outliers(0, 0, worst, 0.0, doubtful=doubtful)
    part = Elements._make(picked(left, *whole))
    distance = difference(part.reference, part.candidate)
    allowed, own, _ = allowances(part)
    inside = part.inside(distance, allowed)
    lost, blind = None, None
    right = widened(part.reference if part.high_precision is None else part.high_precision)
    if high_precision is not None and part.high_precision is not None:
        eager, compiled = (distances_from(part.high_precision, one) for one in (part.reference, part.candidate))
        blind = unconfirmed(part.reference, part.high_precision)
        lost = eager.isinf() if blind is None else eager.isinf() & ~blind
        inside |= eager.isfinite() & (compiled <= thresholds.EAGER_FACTOR * eager)
        if bool(lost.any()):
            without = compiled.isinf() & ~_finite(part.candidate)
            half = half_of_digits(reference.dtype, low_precision=low_precision)
            inside |= lost & (without | _has_digits(compiled, part.high_precision, half, high_precision))
        if blind is not None:
            inside |= blind & (compiled == 0) & widened(part.candidate).isinf()
    outside = ~inside
    if part.digits is not None and own is not None:
        part.digits.logical_and_((distance > own) & inside)
        outside |= part.digits
    if _as_rare_as_jumps(distance[outside], jumping, furthest):
        outside = torch.zeros_like(outside)
    if not plain:
        worst = float(torch.where(outside, _ratios(distance, allowed), 0.0).max().item())
    sizes = difference(right, torch.zeros_like(right))[outside]
    for_none = outside & ~_finite(part.reference) & _finite(part.candidate)
    return Outliers(
        int(outside.sum().item()),
        int((outside & distance.isinf()).sum().item()),
        worst,
        float(sizes.max().item()) if sizes.numel() else 0.0,
        0 if part.digits is None else int((part.digits & outside).sum().item()),
        doubtful,
        int(for_none.sum().item()) if bool(for_none.any()) and _overflows(whole) else 0,
        0 if blind is None else int((outside & blind).sum().item()),
    )


class Allowed(NamedTuple):
    """How far elements may lie from the reference.

    Attributes:
        own: How far by their own noise alone; None if digits are not asked for.
        jumps: Which of them jump in the strong control runs; None without such runs.
    """

    all: torch.Tensor
    own: torch.Tensor | None = None
    jumps: torch.Tensor | None = None


class Elements(NamedTuple):
    """Elements of a tensor, and what is known of them: one-dimensional, or pairs for complex numbers."""

    reference: torch.Tensor
    candidate: torch.Tensor
    noise: torch.Tensor
    unstable: torch.Tensor | None
    strong: torch.Tensor | None
    strong_unstable: torch.Tensor | None
    high_precision: torch.Tensor | None
    digits: torch.Tensor | None

    def inside(self, distance: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
        """A mask of the elements within what is allowed. Where control runs have NaN, NaN is as good as a number."""
        result = distance <= allowed
        for unstable in (self.unstable, self.strong_unstable):
            if unstable is not None:
                result |= unstable & distance.isinf()
        return result


Allowances: TypeAlias = Callable[[Elements], Allowed]
"""A rule of how far elements may lie from the reference."""


def _as_rare_as_jumps(distances: torch.Tensor, jumps: int, greatest: float) -> bool:
    """Whether the unexplained elements are a few that flip in the candidate and by chance in no control run.

    In control runs ``jumps`` elements flip, the furthest by ``greatest``.
    """
    if not jumps or distances.numel() > thresholds.MISSED_JUMPS * jumps:
        return False
    return bool((distances <= thresholds.DRAW_FACTOR * greatest).all())


def _ratios(distance: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
    """Distances in units of what is allowed; 0 where there is none, and infinite for NaN."""
    result = distance / allowed.clamp_min(torch.finfo(allowed.dtype).tiny)
    if not all_finite(result):
        result = torch.where(distance == 0, 0.0, result)
    return result.nan_to_num_(nan=torch.inf, posinf=torch.inf)


def _overflows(whole: Elements) -> bool:
    """Whether eager has NaN or infinity somewhere where float64 has a number within the range of the dtype."""
    for part in map(Elements._make, blocks(*whole)):
        if part.high_precision is not None:
            lost = distances_from(part.high_precision, part.reference).isinf()
            blind = unconfirmed(part.reference, part.high_precision)
            if bool((lost if blind is None else lost & ~blind).any()):
                return True
    return False


def _finite(tensor: torch.Tensor) -> torch.Tensor:
    wide = widened(tensor)  # both parts of a complex number are elements here
    return wide.isfinite()


def _by_noise(reference: torch.Tensor, envelope: Envelope) -> Allowances:
    """How far elements may lie from eager's by the noise of the whole tensor."""
    rounds = reference.dtype.is_floating_point or reference.dtype.is_complex
    scale = envelope.scale(reference) if rounds else None

    def allowed_of(part: Elements) -> Allowed:
        magnitude, noise = magnitudes(part.reference), part.noise
        typical = noise if scale is None else scale.at(magnitude).to(noise.dtype)
        rounded = rounding(magnitude, reference.dtype)
        allowed = thresholds.ENVELOPE_FACTOR * torch.maximum(noise, typical) + rounded
        own = thresholds.ENVELOPE_FACTOR * noise + rounded
        if part.strong is None:
            return Allowed(allowed, own)
        jumps = part.strong > thresholds.STRONG_MAGNITUDE * noise  # twice as much as the magnitudes explain
        allowed = torch.where(jumps, torch.maximum(allowed, thresholds.DRAW_FACTOR * part.strong), allowed)
        own = torch.where(jumps, torch.maximum(own, thresholds.DRAW_FACTOR * part.strong), own)
        return Allowed(allowed, own, jumps)

    return allowed_of


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
    """Root mean square distances from float64.

    Attributes:
        as_good: Whether the candidate is no further from float64 than eager, up to `EAGER_FACTOR`.
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
    low_precision: bool = False,
) -> Closeness:
    """Compare the candidate's distance from float64 with eager's.

    Args:
        up_to: Larger elements are left out: their rounding explains no error in smaller ones.
        low_precision: Whether eager may have left half precision's range.
    """
    eager = distances_from(high_precision, reference)
    compiled = distances_from(high_precision, candidate)
    size = difference(high_precision, torch.zeros_like(high_precision))
    if up_to < float("inf"):
        eager, compiled = (torch.where(size <= up_to, distance, 0.0) for distance in (eager, compiled))
    eager_rms, compiled_rms = root_mean_square(eager), root_mean_square(compiled)
    wrong = compiled.isinf() & ~eager.isinf()
    lost = eager.isinf() & compiled.isfinite()
    if bool(lost.any()):
        half = half_of_digits(reference.dtype, low_precision=low_precision)
        wrong |= lost & ~_has_digits(compiled, high_precision, half, high_precision)
    nowhere_worse = not bool(wrong.any())
    finite = eager.isfinite() & compiled.isfinite()
    greatest = (eager[finite].max().item(), compiled[finite].max().item()) if bool(finite.any()) else (0.0, 0.0)
    ratio = max(times(compiled_rms, eager_rms), times(greatest[1], greatest[0])) if nowhere_worse else float("inf")
    return Closeness(ratio <= thresholds.EAGER_FACTOR, eager_rms, compiled_rms, ratio)


def half_of_digits(dtype: torch.dtype, *, low_precision: bool) -> float:
    """The relative error of a number with half of its digits; 0 for integers.

    Where a region has left half precision's range, the digits of a wider result are those of float16.
    """
    if not (dtype.is_floating_point or dtype.is_complex):
        return 0.0
    least, coarse = (float(torch.finfo(one).eps) for one in (dtype, torch.float16))
    return math.sqrt(max(least, coarse) if low_precision else least)


def _has_digits(distance: torch.Tensor, high_precision: torch.Tensor, half: float, whole: torch.Tensor) -> torch.Tensor:
    """Whether half of an element's digits are right, compared with float64 and with other elements of its size."""
    if not half:
        return distance == 0
    size = difference(high_precision, torch.zeros_like(high_precision))
    near: torch.Tensor = distance <= half * (size + LocalScale.of_sizes(whole).at(size)).nan_to_num_(posinf=0.0)
    return near


def least_digits(dtype: torch.dtype) -> float:
    """The relative error above which an element of a floating dtype has lost its digits."""
    return max(thresholds.LOST_DIGITS, thresholds.LOST_DIGITS_ROUNDOFFS * torch.finfo(dtype).eps)


def lost_digits(
    *, reference: torch.Tensor, candidate: torch.Tensor, high_precision: torch.Tensor
) -> torch.Tensor | None:
    """Find the elements that have lost their digits in the candidate, while eager keeps those of every such element.

    ``exp(x) - 1`` instead of ``expm1(x)`` has no digit left at 1e-9, and beside elements of 1 its error looks like
    rounding. If eager's relative error is small in all elements of this size and above, they are not the remainder of
    a sum of large numbers. Still smaller elements may be such a remainder, and so may a few in which eager is right
    by chance.

    Returns:
        A mask; None for dtypes without digits to lose (integers, complex numbers). Elements below the dtype's
        smallest normal number have fewer digits and are left out, as are NaN and infinity.
    """
    if not reference.dtype.is_floating_point:
        return None
    masks: list[torch.Tensor] = []
    errors = torch.zeros(EXPONENTS, dtype=torch.float64, device=reference.device)
    norm, count = 0.0, 0
    for high, first, second in blocks(high_precision, reference, candidate):
        size = high.to(torch.float64).abs()
        eager, compiled = difference(high, first), difference(high, second)
        counted = size >= torch.finfo(reference.dtype).tiny
        for each in (size, eager, compiled):
            if not all_finite(each):
                counted &= each.isfinite()
        masks.append(counted & (compiled > least_digits(reference.dtype) * size))
        error, among = eager / size, eager
        if not bool(counted.all()):
            error, among = torch.where(counted, error, 0.0), eager[counted]
        errors.scatter_reduce_(0, exponents(size), error.to(torch.float64), "amax")
        norm, count = math.hypot(norm, root_mean_square(among) * math.sqrt(among.numel())), count + among.numel()
    lost = torch.cat(masks) if masks else torch.zeros(0, dtype=torch.bool, device=reference.device)
    factor, typical = thresholds.LOST_DIGITS_EAGER_FACTOR, norm / math.sqrt(count or 1)
    by_size, chance = factor * _greatest_from_here_on(errors), 0.0
    doubted = torch.zeros_like(lost)
    for mask, again, *values in blocks(lost, doubted, high_precision, reference, candidate):
        places = mask.nonzero().flatten()
        if not len(places):
            continue
        high, first, second = (value[places] for value in values)
        size = high.to(torch.float64).abs()
        eager, compiled = difference(high, first), difference(high, second)
        near = compiled > by_size[exponents(size)] * size
        alike = near & (compiled <= factor * typical)
        rounded = torch.maximum(eager, unit_roundoff(reference.dtype) * size)
        chance += _chance(rounded[alike], typical)
        mask[places], again[places] = near, alike
    if chance > math.log10(thresholds.LOST_DIGITS_CHANCE):
        lost &= ~doubted
    return lost.reshape(reference.shape)


def _chance(errors: torch.Tensor, typical: float) -> float:
    """The logarithm to base 10 of the chance that eager is as near as it is where its error is the same everywhere.

    Then these elements are small because large numbers cancel there, and the compiled program's error, which is like
    eager's in the others, is as good. An error of a thousandth of the typical one has a chance of a thousandth.
    """
    chances = (errors / typical).clamp(max=1.0) if typical else errors.new_zeros(1)
    return float(chances.log10().sum().item())


def _greatest_from_here_on(errors: torch.Tensor) -> torch.Tensor:
    """By stored exponent, the greatest error among elements of that size (down to a quarter of it) and above."""
    from_here_on = errors.flip(0).cummax(0).values.flip(0)
    return torch.cat([from_here_on[:1], from_here_on[:-1]])
