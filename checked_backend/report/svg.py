"""The parts that pictures of numbers share: a logarithmic axis, and text that fits."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from markupsafe import Markup

from checked_backend.report.clean import first_line

__all__ = ["LogAxis", "fits", "joined"]

_MOST_TICKS = 6
_LEAST_WIDTH = 2.0


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
        shown = [number for number in numbers if number > 0 and math.isfinite(number)] or [1.0]
        low = math.floor(math.log10(min(shown))) - 1
        return cls(left, width, low, max(math.ceil(math.log10(max(shown))), low + 2))

    def length(self, number: float) -> float:
        """How long the bar of a number is: nothing for 0, the whole width for infinity and NaN."""
        if number <= 0:
            return 0.0
        if not math.isfinite(number):
            return self.width
        share = (math.log10(number) - self.low) / (self.high - self.low)
        return min(self.width, max(_LEAST_WIDTH, self.width * share))

    def grid(self, top: float, bottom: float) -> Markup:
        """Lines at powers of ten, each with its number."""
        step = max(1, (self.high - self.low) // _MOST_TICKS)
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


def joined(parts: Iterable[Markup]) -> Markup:
    """Parts of a picture as one."""
    return Markup("").join(parts)
