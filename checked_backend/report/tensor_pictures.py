"""SVG pictures of one tensor: a heat map of the blocks that differ, and a histogram of units in the last place."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from markupsafe import Markup

from checked_backend.findings import Distribution
from checked_backend.report.svg import joined

__all__ = ["heat_map", "heat_words", "histogram"]

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
        for level, begin, end in _runs([_level(value, low, high) for value in row]):
            if level:
                at = f"M{begin * _CELL} {y * _CELL}h{(end - begin) * _CELL}v{_CELL}H{begin * _CELL}z"
                paths.setdefault(level, []).append(at)
    width, height = max(across, _LEAST_CELLS) * _CELL, len(distribution.blocks) * _CELL
    parts = [
        Markup('<svg class="heat" role="img" viewBox="-1 -1 {} {}" style="max-width:{}px" aria-label="{}">').format(
            width + 2,
            height + 2,
            min(2 * width, _WIDEST_MAP, _TALLEST_MAP * width // height),
            heat_words(distribution),
        ),
        Markup('<rect class="sheet" x="0" y="0" width="{}" height="{}"/>').format(across * _CELL, height),
        *(Markup('<path class="{}" d="{}"/>').format(level, "".join(at)) for level, at in sorted(paths.items())),
    ]
    return joined([*parts, Markup("</svg>")])


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


def _runs(levels: Sequence[str]) -> Iterator[tuple[str, int, int]]:
    begin = 0
    for place in range(1, len(levels) + 1):
        if place == len(levels) or levels[place] != levels[begin]:
            yield levels[begin], begin, place
            begin = place


def histogram(distribution: Distribution) -> Markup | None:
    """Draw how many elements differ by how many units in the last place, the counts on a logarithmic scale.

    Returns:
        The picture, which reads as text too; None where the dtype has no such units.
    """
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
    parts = [
        Markup(
            '<svg class="chart bars" role="img" viewBox="0 0 {} {}" style="min-width:{}px;max-width:{}px" '
            'aria-label="{}">'
        ).format(wide, _TOP + _TALL + _FOOT, 3 * wide // 4, wide, f"Elements by their difference: {told}")
    ]
    for at, (place, count) in enumerate(counts.items()):
        x, tall = _BAR * at, 0.0 if not count else max(2.0, _TALL * (math.log10(count) + 0.5) / top)
        parts.append(
            Markup(
                '<rect class="{}" x="{}" y="{:.1f}" width="{}" height="{:.1f}"/>'
                '<text class="tick" x="{}" y="{}">{}</text>'
            ).format(
                "error" if place else "noise", x + 3, _TOP + _TALL - tall, _BAR - 6, tall,
                x + _BAR / 2, _TOP + _TALL + 15, _tick(place),
            )
        )  # fmt: skip
        if count:
            parts.append(
                Markup('<text class="tick count" x="{}" y="{:.1f}">{}</text>').format(
                    x + _BAR / 2, _TOP + _TALL - tall - 4, _short(count)
                )
            )
    parts.append(
        Markup('<text class="tick" x="{}" y="{}">units in the last place</text>').format(wide / 2, _TOP + _TALL + 31)
    )
    return joined([*parts, Markup("</svg>")])


def _range(place: int) -> str:
    return str(place) if place < 2 else f"{2 ** (place - 1)} to {2**place - 1}"


def _tick(place: int) -> str:
    return str(place) if place < 2 else str(2 ** (place - 1)) if place < 8 else f"2^{place - 1}"


def _short(count: int) -> str:
    return str(count) if count < 10_000 else f"{float(count):.2g}"
