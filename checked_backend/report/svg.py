"""The parts that pictures of numbers share: a logarithmic axis, and text that fits."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from markupsafe import Markup

from checked_backend.report.clean import first_line

__all__ = ["LogAxis", "fits", "fits_subject", "joined"]

_MOST_TICKS = 10
_TICK = 48  # pixels that a tick and its number need
_LEAST_WIDTH = 2.0
_LEAST_POWER = -18
"""Smaller numbers are drawn as nothing. They are below any dtype's rounding, and would leave no room for others."""


@dataclass(frozen=True, slots=True)
class LogAxis:
    """A horizontal axis on which each step is a power of ten.

    Attributes:
        left: Where it begins.
        width: How wide it is.
        low: The power of ten at its left end.
        high: The power of ten at its right end.
    """

    left: float
    width: float
    low: int
    high: int

    @classmethod
    def of(cls, numbers: Iterable[float], left: float, width: float) -> LogAxis:
        """The axis on which all of some numbers lie. Those that are not finite, or not above 0, do not count."""
        shown = [number for number in numbers if number > 10.0**_LEAST_POWER and math.isfinite(number)] or [1.0]
        low = max(_LEAST_POWER, math.floor(math.log10(min(shown))) - 1)
        return cls(left, width, low, max(math.ceil(math.log10(max(shown))), low + 2))

    def length(self, number: float) -> float:
        """How long the bar of a number is: nothing for 0, the whole width for infinity and NaN."""
        if number <= 0:
            return 0.0
        if not math.isfinite(number):
            return self.width
        if number < 10.0**self.low:
            return _LEAST_WIDTH
        share = (math.log10(number) - self.low) / (self.high - self.low)
        return min(self.width, max(_LEAST_WIDTH, self.width * share))

    def grid(self, top: float, bottom: float) -> Markup:
        """Lines at powers of ten, each with its number."""
        most = max(2, min(_MOST_TICKS, int(self.width / _TICK)))
        step = max(1, math.ceil((self.high - self.low) / most))
        lines = []
        for power in range(self.low, self.high + 1, step):
            x = self.left + self.width * (power - self.low) / (self.high - self.low)
            lines.append(
                Markup(
                    '<line class="grid" x1="{0}" x2="{0}" y1="{1}" y2="{2}"/>'
                    '<text class="tick" x="{0}" y="{3}">1e{4}</text>'
                ).format(f"{x:.1f}", top, bottom, top - 8, power)
            )
        return joined(lines)


def fits(text: str, longest: int) -> str:
    """A text's first line, without its middle where it is too long."""
    line = first_line(text)
    if len(line) <= longest:
        return line
    end = longest // 3
    return f"{line[: longest - 3 - end]}...{line[len(line) - end :]}"


def fits_subject(subject: str, longest: int) -> str:
    """A subject without the beginning of its name where that is too long: ``grad[...3.attention.self.key.bias]``.

    Names in a model differ at their ends.
    """
    line = first_line(subject)
    kept = line.find("[") + 1
    if len(line) <= longest or not 0 < kept < longest // 2:
        return fits(line, longest)
    return f"{line[:kept]}...{line[len(line) - longest + kept + 3 :]}"


def joined(parts: Iterable[Markup]) -> Markup:
    """Parts of a picture as one."""
    return Markup("").join(parts)
