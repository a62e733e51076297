"""How large values are in elements that are not much larger than an element."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from checked_backend.verdict import thresholds
from checked_backend.verdict.elements import all_finite, blocks, widened


class LocalScale:
    """For each element, the root mean square of the values of elements that are not much larger than it.

    One huge element, for example of a mask, says nothing about the noise of the others.

    Args:
        parts: Values and magnitudes (0 and more) of elements, of equal shapes.
        greatest: The greatest finite absolute value.
    """

    def __init__(self, parts: Iterable[tuple[torch.Tensor, torch.Tensor]], greatest: float) -> None:
        self._greatest = greatest
        squares = elements = present = torch.zeros(EXPONENTS, dtype=torch.float64)
        for values, magnitude in parts if greatest else ():
            places = exponents(magnitude)
            scaled = values.reshape(-1).to(torch.float64).div(greatest).square_()
            here = torch.bincount(places, minlength=EXPONENTS).to(torch.float64).cpu()
            present = present + here
            if not all_finite(scaled):
                finite = scaled.isfinite()
                scaled = torch.where(finite, scaled, 0.0)
                here = torch.bincount(places, finite.to(torch.float64), EXPONENTS).cpu()
            elements = elements + here
            squares = squares + torch.bincount(places, scaled, EXPONENTS).cpu()
        sized = present[1:-1].nonzero()
        self._last = int(sized.max()) + 1 if len(sized) else 0
        self._means = squares[1:-1].cumsum(0) / elements[1:-1].cumsum(0).clamp_min(1.0)
        self._overall = squares[:-1].sum() / elements[:-1].sum().clamp_min(1.0)

    @classmethod
    def of_sizes(cls, tensor: torch.Tensor) -> LocalScale:
        """The scale of a tensor's own elements."""
        sizes = (widened(part).abs() for (part,) in blocks(tensor))
        greatest = max((float(size.nan_to_num(nan=0.0, posinf=0.0).max()) for size in sizes), default=0.0)
        sizes = (widened(part).abs() for (part,) in blocks(tensor))
        return cls(((size, size) for size in sizes), greatest)

    def at(self, magnitude: torch.Tensor, reach: int = thresholds.NEIGHBOUR_BITS) -> torch.Tensor:
        """The root mean square for each element.

        Args:
            magnitude: The magnitudes of some or all elements.
            reach: How much larger an element may be, as a power of two.

        Returns:
            A float64 tensor of that shape: the root mean square over the finite elements of up to ``2 ** reach`` times
            the element's magnitude. For elements that are zero or not finite it is over all finite elements.
        """
        table = self._overall.repeat(EXPONENTS)
        within = max(0, self._last - reach - 1)  # so many exponents do not reach the greatest element
        table[1 : 1 + within] = self._means[reach : reach + within]
        table = table.sqrt_().mul_(self._greatest).to(magnitude.device)
        return table[exponents(magnitude)].reshape(magnitude.shape)


EXPONENTS = 1 << 11
"""The exponents of float64 as they are stored: the first is that of 0, the last that of NaN and infinities."""


def exponents(magnitude: torch.Tensor) -> torch.Tensor:
    """The stored exponents of numbers that are 0 or more; float64's subnormal numbers count as 0."""
    return magnitude.reshape(-1).to(torch.float64).view(torch.int64) >> 52 & EXPONENTS - 1


def local_root_mean_square(values: torch.Tensor, magnitude: torch.Tensor) -> torch.Tensor:
    """The `LocalScale` of values, at each of them."""
    finite = values.abs().nan_to_num(nan=0.0, posinf=0.0) * magnitude.isfinite()
    greatest = float(finite.max().item()) if values.numel() else 0.0
    return LocalScale([(values, magnitude)], greatest).at(magnitude)
