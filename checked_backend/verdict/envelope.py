"""The noise that a program must have at its precision: elementwise envelopes from control runs, and remembered scales.

Monte Carlo arithmetic (Parker, *Monte Carlo Arithmetic*, UCLA TR 970002, 1997; Verificarlo, Denis et al., ARITH 2016)
runs the reference a few times with every rounding made random. A correct compiler may be as far from the reference as
those runs are, element by element.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from checked_backend.numerics.bits import is_floating
from checked_backend.numerics.quick_diff import QuickDiff
from checked_backend.verdict import thresholds
from checked_backend.verdict.elements import (
    LocalScale,
    all_finite,
    blocks,
    difference,
    magnitudes,
    root_mean_square,
    rounding,
)


def times(difference: float, noise: float) -> float:
    """How many times the noise a difference is; infinite if there is a difference and no noise."""
    if not difference:
        return 0.0
    return difference / noise if noise > 0 else float("inf")


@dataclass(slots=True)
class Envelope:
    """The greatest distance of control runs from the reference, element by element.

    Attributes:
        values: The distances, in units of the tensor. A run counts only where its element and the reference's are
            both finite, or the same.
        unstable: Where a control run was NaN or infinite and the reference was not, or the reverse; None: nowhere.
        jumps: How many elements of later runs are as far from the earlier runs as no noise of their own explains.
        furthest: The greatest distance of these.
    """

    values: torch.Tensor
    runs: int = 1
    unstable: torch.Tensor | None = None
    jumps: int = 0
    furthest: float = 0.0
    _sizes: tuple[float, float] | None = field(default=None, repr=False)

    @classmethod
    def of(cls, reference: torch.Tensor, sample: torch.Tensor) -> Envelope:
        """The envelope of one control run."""
        values, unstable = _finite_part(difference(reference, sample))
        return cls(values, unstable=unstable)

    def add(self, reference: torch.Tensor, sample: torch.Tensor) -> None:
        """Take one more control run in."""
        values, unstable = _finite_part(difference(reference, sample))
        if self.runs >= thresholds.MORE_RUNS and is_floating(reference):
            self._count_jumps(reference, values)
        torch.maximum(self.values, values, out=self.values)
        if unstable is not None:
            self.unstable = unstable if self.unstable is None else self.unstable | unstable
        self.runs += 1
        self._sizes = None

    def _count_jumps(self, reference: torch.Tensor, distances: torch.Tensor) -> None:
        """Ask of a control run what the candidate is asked: which elements do the other runs not explain?

        Where two numbers nearly cancel before they are divided by their own size, a few elements of each run jump.
        """
        for right, known, distance in blocks(reference, self.values, distances):
            allowed = thresholds.ENVELOPE_FACTOR * known + rounding(magnitudes(right), reference.dtype)
            further = distance[distance > allowed]
            if further.numel():
                self.jumps += further.numel()
                self.furthest = max(self.furthest, float(further.max().item()))

    @property
    def rms(self) -> float:
        """Root mean square of the values."""
        return self._measured()[0]

    @property
    def max(self) -> float:
        """The greatest value; 0 if there is none."""
        return self._measured()[1]

    def _measured(self) -> tuple[float, float]:
        if self._sizes is None:
            greatest = float(self.values.max().item()) if self.values.numel() else 0.0
            self._sizes = root_mean_square(self.values), greatest
        return self._sizes

    def scale(self, magnitude: torch.Tensor) -> LocalScale:
        """The noise of elements that are not much larger than an element, by the magnitudes in a tensor."""
        parts = ((values, magnitudes(part)) for part, values in blocks(magnitude, self.values))
        return LocalScale(parts, self.max)


def _finite_part(distance: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The distances that are finite, and where they are not."""
    if all_finite(distance):
        return distance, None
    unstable = distance.isinf()
    return torch.where(unstable, 0.0, distance), unstable if bool(unstable.any()) else None


@dataclass(frozen=True, slots=True)
class NoiseBaseline:
    """A tensor's noise relative to its own root mean square, kept from the calls in which it was decided about.

    Attributes:
        rms: Relative root mean square of the noise.
        max: Relative greatest noise of one element.
        sizes: For a tensor that is zero but for rounding, the least and the greatest root mean square that it had; None
            for others. Such a tensor is noise itself, so its noise is relative to the greatest of these, not to its
            present size.
        settles: Whether this scale may settle later calls. Noise as large as the tensor hides any bug.
        own: `rms` and `max` of the noise alone, without the difference that was seen with it.
    """

    rms: float
    max: float
    sizes: tuple[float, float] | None = None
    settles: bool = True
    own: tuple[float, float] | None = None

    def covers(self, glance: QuickDiff, *, slack: float) -> bool:
        """The cheap test of every later call: is this difference no larger than the one decided before?

        A tensor that was nothing but rounding may be something else now. Then it is larger, and a difference of its
        own size is more than the rounding was. If the tensor is much smaller than it was, the rounding may be smaller
        too, so the scale does not settle it.

        Args:
            slack: How many times larger it may be: two draws from one noise differ by this much.
        """
        size = glance.reference_rms
        if not self.settles:
            return False
        if self.sizes is not None:
            if size < self.sizes[0] / slack:
                return False
            size = self.sizes[1]
        return glance.rmse <= self.rms * slack * size and glance.max_abs_diff <= self.max * slack * size

    def ratio(self, glance: QuickDiff) -> float:
        """How many times the noise a difference is; infinite if there is a difference and no noise."""
        size = glance.reference_rms if self.sizes is None else self.sizes[1]
        rms, greatest = self.own or (self.rms, self.max)
        return max(times(glance.rmse, rms * size), times(glance.max_abs_diff, greatest * size))

    def limit(self, glance: QuickDiff, *, slack: float) -> float:
        """The smallest relative error that `covers` would have found in a tensor that it covers."""
        size = glance.reference_rms if self.sizes is None else self.sizes[1]
        return slack * self.rms * size / (glance.reference_rms or size or 1.0)

    def widened(self, other: NoiseBaseline | None) -> NoiseBaseline:
        """The scale that covers what either of the two covers, so that alternating data are not rechecked each time.

        Scales that cannot be joined (one does not settle, or only one has `sizes`) leave this one as it is.
        """
        if other is None or not (self.settles and other.settles) or (self.sizes is None) != (other.sizes is None):
            return self
        if self.sizes is None or other.sizes is None:
            own = max((one.own for one in (self, other) if one.own is not None), default=None)
            return NoiseBaseline(max(self.rms, other.rms), max(self.max, other.max), own=own)
        least, greatest = min(self.sizes[0], other.sizes[0]), max(self.sizes[1], other.sizes[1])
        share, others_share = (sizes[1] / greatest if greatest else 1.0 for sizes in (self.sizes, other.sizes))
        return NoiseBaseline(
            max(self.rms * share, other.rms * others_share),
            max(self.max * share, other.max * others_share),
            (least, greatest),
            own=self.own,
        )
