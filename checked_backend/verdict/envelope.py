"""The noise that a program must have at its precision: elementwise envelopes from control runs, and remembered scales.

Monte Carlo arithmetic (Parker, *Monte Carlo Arithmetic*, UCLA TR 970002, 1997; Verificarlo, Denis et al., ARITH 2016)
runs the reference a few times with every rounding made random. A correct compiler may be as far from the reference as
those runs are, element by element.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from checked_backend.numerics.quick_diff import QuickDiff
from checked_backend.verdict import thresholds

__all__ = [
    "Envelope",
    "NoiseBaseline",
    "difference",
    "local_root_mean_square",
    "root_mean_square",
    "times",
    "unconfirmed",
    "widened",
]


def times(difference: float, noise: float) -> float:
    """How many times the noise a difference is; infinite if there is a difference and no noise."""
    if not difference:
        return 0.0
    return difference / noise if noise > 0 else float("inf")


def widened(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's values in a real dtype that allows differences.

    float64 and integers become float64, complex numbers become pairs of reals, everything else becomes float32.
    """
    tensor = tensor.detach()
    if tensor.dtype.is_complex:
        wide = torch.complex128 if tensor.dtype == torch.complex128 else torch.complex64
        return torch.view_as_real(tensor.resolve_conj().resolve_neg().to(wide))
    if tensor.dtype == torch.float64 or not tensor.dtype.is_floating_point:
        return tensor.to(torch.float64)
    return tensor.to(torch.float32)


def difference(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Absolute difference, element by element.

    Returns:
        A tensor in the wider of the two widened dtypes. It is 0 where the values are equal (NaN equals NaN, an infinity
        equals itself), ``inf`` where one is NaN or infinite and the other is not the same, and at least 1 where
        integers differ.
    """
    one, two = widened(first), widened(second)
    if one.dtype != two.dtype:
        one, two = one.to(torch.float64), two.to(torch.float64)
    result = (one - two).abs_()
    if torch.isfinite(result).all():
        finite = result
    else:
        same = (one == two) | (one.isnan() & two.isnan())
        finite = torch.where(same, 0.0, torch.where(one.isfinite() & two.isfinite(), result, torch.inf))
    if not (first.dtype.is_floating_point or first.dtype.is_complex):
        # int64 beyond 2**53 can differ where its float64 values do not
        finite = torch.where(first != second, finite.clamp_min(1.0), 0.0)
    return finite


def unconfirmed(reference: torch.Tensor, high_precision: torch.Tensor) -> torch.Tensor | None:
    """Mask the elements of which eager has a number and float64 has none, so that float64 confirms nothing.

    A matrix that is singular in float64 may be not quite singular in float32. A program may overflow, or take the
    logarithm of zero, in float64 alone. Where the reference and the twin are both infinite, they agree whatever they
    compute.

    Args:
        reference: Eager's tensor.
        high_precision: The reference in float64; beyond the range of the tensor's dtype it counts as infinite.

    Returns:
        A mask, of the shape of `difference`; None where there is no such element.
    """
    none = widened(high_precision.to(reference.dtype)).isfinite().logical_not_()
    if not bool(none.any()):
        return None
    none &= widened(reference).isfinite()
    return none if bool(none.any()) else None


def root_mean_square(values: torch.Tensor) -> float:
    """Root mean square of the finite elements; 0 if there are none."""
    wide = widened(values).to(torch.float64)
    finite = wide.isfinite()
    if not bool(finite.all()):
        wide = wide[finite]
    if not wide.numel():
        return 0.0
    norm = float(torch.linalg.vector_norm(wide).item())
    if norm == float("inf"):  # the squares overflow
        greatest = wide.abs().max()
        norm = float((torch.linalg.vector_norm(wide / greatest) * greatest).item())
    return norm / float(wide.numel() ** 0.5)


def local_root_mean_square(
    values: torch.Tensor, magnitude: torch.Tensor, reach: int = thresholds.NEIGHBOUR_BITS
) -> torch.Tensor:
    """For each element, the root mean square of the values of elements that are not much larger than it.

    One huge element, for example of a mask, says nothing about the noise of the others.

    Args:
        values: Any numbers.
        magnitude: The elements' absolute values, of the same shape.
        reach: How much larger an element may be, as a power of two.

    Returns:
        A float64 tensor of that shape: the root mean square over the finite elements of up to ``2 ** reach`` times the
        element's magnitude. For elements that are zero or not finite it is over all finite elements.
    """
    finite = (values.isfinite() & magnitude.isfinite()).flatten()
    greatest = float(torch.where(finite, values.flatten(), 0).abs().max().item()) if values.numel() else 0.0
    if not greatest:
        return torch.zeros(values.shape, dtype=torch.float64, device=values.device)
    squares = torch.where(finite, values.flatten().to(torch.float64) / greatest, 0.0).square_()
    sized = (magnitude.isfinite() & (magnitude > 0)).flatten()
    exponents = torch.frexp(torch.where(sized, magnitude.flatten().to(torch.float64), 1.0)).exponent
    lowest = int(exponents[sized].min().item()) if bool(sized.any()) else 0
    last = int(exponents[sized].max().item()) - lowest if bool(sized.any()) else 0
    place = torch.where(sized, exponents - lowest, last).to(torch.int64)
    counted = torch.where(sized & finite, place, 0)
    sums = torch.bincount(counted, torch.where(sized, squares, 0.0), last + 1).cumsum(0)
    counts = torch.bincount(counted, (sized & finite).to(torch.float64), last + 1).cumsum(0)
    means = sums / counts.clamp_min(1.0)
    means[-1] = squares.sum() / finite.sum()
    return (means[(place + reach).clamp_max(last)].sqrt_() * greatest).reshape(values.shape)


@dataclass(slots=True)
class Envelope:
    """The greatest distance of control runs from the reference, element by element.

    Attributes:
        values: The distances, in units of the tensor. A run counts only where its element and the reference's are
            both finite, or the same.
        runs: Number of control runs.
        unstable: Where a control run was NaN or infinite and the reference was not, or the reverse; None: nowhere.
    """

    values: torch.Tensor
    runs: int = 1
    unstable: torch.Tensor | None = None

    @classmethod
    def of(cls, reference: torch.Tensor, sample: torch.Tensor) -> Envelope:
        """The envelope of one control run."""
        return cls(*_finite_part(difference(reference, sample), 1))

    def add(self, reference: torch.Tensor, sample: torch.Tensor) -> None:
        """Take one more control run in."""
        values, _, unstable = _finite_part(difference(reference, sample), 1)
        torch.maximum(self.values, values, out=self.values)
        if unstable is not None:
            self.unstable = unstable if self.unstable is None else self.unstable | unstable
        self.runs += 1

    @property
    def rms(self) -> float:
        """Root mean square of the finite part."""
        return root_mean_square(self.values)

    @property
    def max(self) -> float:
        """Greatest finite element; 0 if there is none."""
        finite = self.values[self.values.isfinite()]
        return float(finite.max().item()) if finite.numel() else 0.0


def _finite_part(distance: torch.Tensor, runs: int) -> tuple[torch.Tensor, int, torch.Tensor | None]:
    unstable = distance.isinf()
    if not bool(unstable.any()):
        return distance, runs, None
    return torch.where(unstable, 0.0, distance), runs, unstable


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
            glance: The difference now.
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
            return NoiseBaseline(max(self.rms, other.rms), max(self.max, other.max), own=self.own)
        least, greatest = min(self.sizes[0], other.sizes[0]), max(self.sizes[1], other.sizes[1])
        share, others_share = (sizes[1] / greatest if greatest else 1.0 for sizes in (self.sizes, other.sizes))
        return NoiseBaseline(
            max(self.rms * share, other.rms * others_share),
            max(self.max * share, other.max * others_share),
            (least, greatest),
            own=self.own,
        )
