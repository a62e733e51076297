"""Compare the candidate compiled in float64 with eager in float64: there, a difference is one of logic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from checked_backend.verdict import thresholds
from checked_backend.verdict.elements import blocks, difference, magnitudes, picked, root_mean_square, widened
from checked_backend.verdict.envelope import Envelope
from checked_backend.verdict.flips import as_rare_as_jumps, as_rare_as_unstable, known
from checked_backend.verdict.local_scale import LocalScale
from checked_backend.verdict.outliers import ratios

__all__ = ["TwinDifference", "twin_difference"]


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
    if not high_precision.numel():
        return TwinDifference(False, 0.0, 0.0, equal=True)
    whole = _InFloat64(
        high_precision,
        twin,
        None if envelope is None else envelope.values,
        None if envelope is None else envelope.unstable,
        None if further is None else further.values,
        None if further is None else further.unstable,
        blind,
    )
    allowances = _TwinAllowances(high_precision, envelope)
    masks: list[torch.Tensor] = []
    worst, greatest, jumping, furthest = 0.0, -1.0, 0, 0.0
    for part in map(_InFloat64._make, blocks(*whole)):  # most elements are settled here
        distance, (allowed, jumps) = part.distance(), allowances.of(part)
        inside = distance <= allowed
        masks.append(~inside)
        worst = max(worst, float(torch.where(inside, ratios(distance, allowed), 0.0).max()))
        greatest = max(greatest, float(torch.where(inside, distance, -1.0).max()))
        if jumps is not None and part.further is not None and bool(jumps.any()):
            jumping, furthest = jumping + int(jumps.sum()), max(furthest, float(part.further[jumps].max()))
    left = torch.cat(masks)
    scale = root_mean_square(high_precision)
    if not bool(left.any()):
        return TwinDifference(False, greatest / scale if scale else greatest, worst, equal=not greatest)
    part = _InFloat64._make(picked(left, *whole))
    distance, (allowed, _) = part.distance(), allowances.of(part)
    values = known(widened(part.high_precision), widened(part.twin))
    for runs, unstable in ((envelope, part.unstable), (further, part.further_unstable)):
        if runs is not None and unstable is not None:
            distance[unstable & distance.isinf()] = 0.0
            infinite = distance.isinf()
            tolerated = as_rare_as_unstable(values[infinite], (runs,), high_precision, twin)
            distance[infinite] = torch.where(tolerated, 0.0, distance[infinite])
    outside = ~(distance <= allowed)
    if as_rare_as_jumps(distance[outside], jumping, furthest):
        distance[outside] = 0.0
    finite = distance[distance.isfinite()]
    if finite.numel():
        greatest = max(greatest, float(finite.max()))
    elif greatest < 0:  # no distance is a number
        greatest = float(distance.max())
    worst = max(worst, float(ratios(distance, allowed).max()))
    return TwinDifference(bool((~(distance <= allowed)).any()), greatest / scale if scale else greatest, worst)


class _InFloat64(NamedTuple):
    """Elements of a tensor in float64, and what is known of them: one-dimensional, or pairs for complex numbers."""

    high_precision: torch.Tensor
    twin: torch.Tensor
    noise: torch.Tensor | None
    unstable: torch.Tensor | None
    further: torch.Tensor | None
    further_unstable: torch.Tensor | None
    blind: torch.Tensor | None

    def distance(self) -> torch.Tensor:
        distance = difference(self.high_precision, self.twin).to(torch.float64)
        return distance if self.blind is None else torch.where(self.blind, 0.0, distance)


class _TwinAllowances:
    """How far elements of the float64 twin may lie from the float64 reference.

    Args:
        high_precision: The reference, whole.
        envelope: Its noise.
    """

    def __init__(self, high_precision: torch.Tensor, envelope: Envelope | None) -> None:
        self._sizes = LocalScale.of_sizes(high_precision)
        self._noise = None if envelope is None else envelope.scale(high_precision)

    def of(self, part: _InFloat64) -> tuple[torch.Tensor, torch.Tensor | None]:
        """How far each element may lie from the reference, and which elements jump."""
        magnitude = magnitudes(part.high_precision).to(torch.float64)
        allowed = thresholds.TWIN_TOLERANCE * (magnitude + self._sizes.at(magnitude))
        allowed += torch.finfo(torch.float64).tiny  # where numbers are subnormal nothing is relative
        allowed += 2.0**-thresholds.CANCELLED_REST_BITS * self._sizes.at(magnitude, thresholds.CANCELLED_BITS)
        if part.noise is not None and self._noise is not None:
            noise = torch.maximum(part.noise.to(torch.float64), self._noise.at(magnitude))
            allowed += thresholds.TWIN_ENVELOPE_FACTOR * noise
        if part.further is None:
            return allowed, None
        jumps = part.further > allowed
        return torch.where(jumps, thresholds.STRONG_FACTOR * part.further.to(torch.float64), allowed), jumps
