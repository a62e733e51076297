"""SVG of the numbers of a finding: the error of each result, and the inside of one tensor."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from markupsafe import Markup

from checked_backend.findings import Distribution, Finding
from checked_backend.report.causes import several_regions
from checked_backend.report.clean import first_line

_MOST_TICKS = 10
_TICK = 48  # pixels that a tick and its number need
_LEAST_WIDTH = 2.0
_LEAST_POWER = -18
"""Smaller numbers are drawn as nothing. They are below any dtype's rounding, and would leave no room for others."""


@dataclass(frozen=True, slots=True)
class LogAxis:
    """A horizontal axis from one power of ten to another."""

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
            at = f"{x:.1f}"
            lines.append(tag("line", class_="grid", x1=at, x2=at, y1=top, y2=bottom))
            lines.append(tag("text", f"1e{power}", class_="tick", x=at, y=top - 8))
        return joined(lines)


def fits(text: str, longest: int) -> str:
    """A text's first line, without its middle where it is too long."""
    line = first_line(text)
    if len(line) <= longest:
        return line
    end = longest // 3
    return f"{line[: longest - 3 - end]}...{line[len(line) - end :]}"


def picture(kind: str, box: str, words: str, parts: Iterable[Markup], **more: object) -> Markup:
    """A picture that reads as text too."""
    return tag("svg", joined(parts), class_=kind, role="img", viewBox=box, **more, aria_label=words)


def tag(name: str, inside: object = None, **attributes: object) -> Markup:
    """An element; what is in it and its attributes are escaped."""
    written = joined(
        Markup(' {}="{}"').format(key.rstrip("_").replace("_", "-"), value) for key, value in attributes.items()
    )
    end = "/>" if inside is None else Markup(">{}</{}>").format(inside, name)
    return Markup("<{}{}").format(name, written) + Markup(end)


def joined(parts: Iterable[Markup]) -> Markup:
    """Parts of a picture as one."""
    return Markup("").join(parts)


# -- the error of each result -----------------------------------------------------------------------------------------

_MOST = 24
_HEAD, _END = 22, 74
_LEFT, _PLOT, _ROW = 310, 370, 26
_LONGEST = 41
"""The most characters of a name."""


def error_chart(findings: Sequence[Finding]) -> Markup | None:
    """Draw each result's error beside its rounding noise on a logarithmic axis; None without any numbers."""
    where = several_regions(findings)
    bars = [bar for finding in findings if (bar := _bar(finding, where)) is not None][:_MOST]
    if not bars:
        return None
    axis = LogAxis.of((number for _, *both in bars for number in both), _LEFT, _PLOT)
    height = _HEAD + _ROW * len(bars) + 6
    told = "; ".join(f"{name}: error {error:.2g}, noise {noise:.2g}" for name, error, noise in bars)
    parts = [axis.grid(_HEAD, height)]
    for number, (name, error, noise) in enumerate(bars):
        top, long = _HEAD + _ROW * number, axis.length(error)
        parts += [
            tag("text", name, class_="name", x=_LEFT - 8, y=top + 16),
            tag("rect", class_="error", x=_LEFT, y=top + 4, width=f"{long:.1f}", height=9),
            tag("rect", class_="noise", x=_LEFT, y=top + 15, width=f"{axis.length(noise):.1f}", height=6),
            tag("text", f"{error:.2g}", class_="value", x=f"{_LEFT + long + 6:.1f}", y=top + 13),
        ]
    box = f"0 0 {_LEFT + _PLOT + _END} {height}"
    return picture("chart", box, f"Error and rounding noise, relative: {told}", parts)


def _bar(finding: Finding, where: bool) -> tuple[str, float, float] | None:
    """A result's name, its error, and the noise that it must have, relative to its root mean square."""
    metrics, noise = finding.metrics, finding.noise
    if metrics is None or not metrics.reference_rms > 0 or not math.isfinite(metrics.reference_rms):
        return None
    error = metrics.rmse / metrics.reference_rms
    floor = 0.0 if noise is None else noise.rms / metrics.reference_rms
    if not (math.isfinite(error) and math.isfinite(floor) and error > 0):
        return None
    region = f" of {finding.region}" if where else ""
    line = first_line(f"{finding.subject}{region}")
    kept = line.find("[") + 1
    if len(line) <= _LONGEST or not 0 < kept < _LONGEST // 2:
        return fits(line, _LONGEST), error, floor
    # names in a model differ at their ends: grad[...3.attention.self.key.bias]
    return f"{line[:kept]}...{line[len(line) - _LONGEST + kept + 3 :]}", error, floor


# -- the inside of a tensor --------------------------------------------------------------------------------------------

_LEVELS = 8
_CELL = 12
_WIDEST_MAP = 440
_TALLEST_MAP = 520
_LEAST_CELLS = 8
_BAR, _TALL, _FOOT, _TOP = 34, 120, 34, 18
_LEAST_BARS, _MOST_BARS = 8, 72


def heat_map(distribution: Distribution) -> Markup | None:
    """Draw the greatest difference in each block of a tensor, the greater the stronger, on a logarithmic scale.

    Returns:
        The picture, which reads as text too; None where no block differs.
    """
    values = [value for row in distribution.blocks for value in row if value > 0 and math.isfinite(value)]
    every = [value for row in distribution.blocks for value in row]
    if not any(value != 0 for value in every) or (len(every) == 1 and not distribution.shape):
        return None  # a single number has no places
    low, high = (min(values), max(values)) if values else (1.0, 1.0)
    across = max(map(len, distribution.blocks))
    paths: dict[str, list[str]] = {}
    for y, row in enumerate(distribution.blocks):
        begin = 0
        for level, alike in groupby(_level(value, low, high) for value in row):
            long = len(list(alike))
            if level:
                at = f"M{begin * _CELL} {y * _CELL}h{long * _CELL}v{_CELL}H{begin * _CELL}z"
                paths.setdefault(level, []).append(at)
            begin += long
    width, height = max(across, _LEAST_CELLS) * _CELL, len(distribution.blocks) * _CELL
    parts = [
        tag("rect", class_="sheet", x=0, y=0, width=across * _CELL, height=height),
        *(tag("path", class_=level, d="".join(at)) for level, at in sorted(paths.items())),
    ]
    widest = min(2 * width, _WIDEST_MAP, _TALLEST_MAP * width // height)
    box = f"-1 -1 {width + 2} {height + 2}"
    return picture("heat", box, heat_words(distribution), parts, style=f"max-width:{widest}px")


def heat_words(distribution: Distribution) -> str:
    """The heat map in words."""
    blocks = [value for row in distribution.blocks for value in row]
    hot = [value for value in blocks if value != 0]
    finite = [value for value in hot if math.isfinite(value)]
    shape = " x ".join(map(str, distribution.shape)) or "a single number"
    words = f"Greatest difference in each block of the tensor ({shape}): {len(hot)} of {len(blocks)} blocks differ"
    if finite:
        words += f", by {min(finite):.2g} to {max(finite):.2g}"
    if len(finite) < len(hot):
        strange = len(hot) - len(finite)
        words += f"; {strange} {'has' if strange == 1 else 'have'} NaN or infinity on one side only"
    return words + "."


def _level(value: float, low: float, high: float) -> str:
    if value == 0 or value < 0:
        return ""
    if not math.isfinite(value):
        return "hx"
    share = 1.0 if high <= low else (math.log(value) - math.log(low)) / (math.log(high) - math.log(low))
    return f"h{1 + min(_LEVELS - 1, int(share * _LEVELS))}"


def histogram(distribution: Distribution) -> Markup | None:
    """Draw how many elements differ by how many ulps, on a logarithmic scale; None where the dtype has no ulps."""
    every = distribution.ulps[:_MOST_BARS]
    if not any(every):
        return None
    counts = dict(enumerate(every))
    first = next((place for place, count in counts.items() if place and count), 1)
    for place in range(1, max(1, min(first - 1, len(every) - _LEAST_BARS))):
        del counts[place]  # nothing is there, and nothing between it and those that differ by 0
    top = math.log10(max(every)) + 0.5
    wide = _BAR * max(len(counts), _LEAST_BARS)
    told = "; ".join(f"{_range(place)} ulp: {_short(count)}" for place, count in counts.items() if count)
    parts = []
    for at, (place, count) in enumerate(counts.items()):
        x, tall = _BAR * at, 0.0 if not count else max(2.0, _TALL * (math.log10(count) + 0.5) / top)
        y, middle = _TOP + _TALL - tall, x + _BAR / 2
        kind = "error" if place else "noise"
        parts.append(tag("rect", class_=kind, x=x + 3, y=f"{y:.1f}", width=_BAR - 6, height=f"{tall:.1f}"))
        parts.append(tag("text", _tick(place), class_="tick", x=middle, y=_TOP + _TALL + 15))
        if count:
            parts.append(tag("text", _short(count), class_="tick count", x=middle, y=f"{y - 4:.1f}"))
    parts.append(tag("text", "units in the last place", class_="tick", x=wide / 2, y=_TOP + _TALL + 31))
    style = f"min-width:{3 * wide // 4}px;max-width:{wide}px"
    words = f"Elements by their difference: {told}"
    return picture("chart bars", f"0 0 {wide} {_TOP + _TALL + _FOOT}", words, parts, style=style)


def _range(place: int) -> str:
    return str(place) if place < 2 else f"{2 ** (place - 1)} to {2**place - 1}"


def _tick(place: int) -> str:
    return str(place) if place < 2 else str(2 ** (place - 1)) if place < 8 else f"2^{place - 1}"


def _short(count: int) -> str:
    return str(count) if count < 10_000 else f"{float(count):.2g}"
