"""SVG of the error of each result, beside its rounding noise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from checked_backend.findings import Finding
from checked_backend.report.causes import several_regions
from checked_backend.report.svg import LogAxis, fits_subject, joined

__all__ = ["error_chart"]

_MOST = 24
_HEAD, _END = 22, 74


@dataclass(frozen=True, slots=True)
class _Bar:
    """One result: its error, and the noise that it must have, relative to its root mean square."""

    name: str
    error: float
    noise: float


@dataclass(frozen=True, slots=True)
class _Layout:
    """Where things are in a row.

    Attributes:
        left: Where the bars begin.
        plot: How long they are at most.
        row: The height of a row.
        name: Where the name is: from the left, and from the top of the row.
        bars: The upper end of the bars.
        longest: The most characters of a name.
    """

    left: int
    plot: int
    row: int
    name: tuple[int, int]
    bars: int
    longest: int


_BROAD = _Layout(left=310, plot=370, row=26, name=(302, 16), bars=4, longest=41)
_NARROW = _Layout(left=18, plot=238, row=42, name=(0, 14), bars=19, longest=44)
"""For a phone: the bars are below the name."""


def error_chart(findings: Sequence[Finding], *, narrow: bool = False) -> Markup | None:
    """Draw each result's error beside its rounding noise on a logarithmic axis.

    Args:
        findings: Those of one cause; the first ones are drawn.
        narrow: Draw it as narrow as a phone.

    Returns:
        The picture, which reads as text too; None where no finding has numbers.
    """
    layout = _NARROW if narrow else _BROAD
    where = several_regions(findings)
    bars = [bar for finding in findings if (bar := _bar(finding, layout, where)) is not None][:_MOST]
    if not bars:
        return None
    axis = LogAxis.of((number for bar in bars for number in (bar.error, bar.noise)), layout.left, layout.plot)
    height = _HEAD + layout.row * len(bars) + 6
    told = "; ".join(f"{bar.name}: error {bar.error:.2g}, noise {bar.noise:.2g}" for bar in bars)
    parts = [
        Markup('<svg class="chart {}" role="img" viewBox="0 0 {} {}" aria-label="{}">').format(
            "narrow" if narrow else "broad",
            layout.left + layout.plot + _END,
            height,
            f"Error and rounding noise, relative: {told}",
        ),
        axis.grid(_HEAD, height),
    ]
    for number, bar in enumerate(bars):
        top, long = _HEAD + layout.row * number, axis.length(bar.error)
        y = top + layout.bars
        parts.append(
            Markup(
                '<text class="name" x="{}" y="{}">{}</text>'
                '<rect class="error" x="{}" y="{}" width="{:.1f}" height="9"/>'
                '<rect class="noise" x="{}" y="{}" width="{:.1f}" height="6"/>'
                '<text class="value" x="{:.1f}" y="{}">{}</text>'
            ).format(
                layout.name[0], top + layout.name[1], bar.name, layout.left, y, long, layout.left, y + 11,
                axis.length(bar.noise), layout.left + long + 6, y + 9, f"{bar.error:.2g}",
            )
        )  # fmt: skip
    return joined([*parts, Markup("</svg>")])


def _bar(finding: Finding, layout: _Layout, where: bool) -> _Bar | None:
    metrics, noise = finding.metrics, finding.noise
    if metrics is None or not metrics.reference_rms > 0 or not math.isfinite(metrics.reference_rms):
        return None
    error = metrics.rmse / metrics.reference_rms
    floor = 0.0 if noise is None else noise.rms / metrics.reference_rms
    if not (math.isfinite(error) and math.isfinite(floor) and error > 0):
        return None
    region = f" of {finding.region}" if where else ""
    return _Bar(fits_subject(f"{finding.subject}{region}", layout.longest), error, floor)
