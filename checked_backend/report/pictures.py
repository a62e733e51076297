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
_LEFT, _PLOT, _ROW = 310, 370, 26
_LONGEST = 41
"""The most characters of a name."""


@dataclass(frozen=True, slots=True)
class _Bar:
    """One result: its error, and the noise that it must have, relative to its root mean square."""

    name: str
    error: float
    noise: float


def error_chart(findings: Sequence[Finding]) -> Markup | None:
    """Draw each result's error beside its rounding noise on a logarithmic axis.

    Args:
        findings: Those of one cause; the first ones are drawn.

    Returns:
        The picture, which reads as text too; None where no finding has numbers.
    """
    where = several_regions(findings)
    bars = [bar for finding in findings if (bar := _bar(finding, where)) is not None][:_MOST]
    if not bars:
        return None
    axis = LogAxis.of((number for bar in bars for number in (bar.error, bar.noise)), _LEFT, _PLOT)
    height = _HEAD + _ROW * len(bars) + 6
    told = "; ".join(f"{bar.name}: error {bar.error:.2g}, noise {bar.noise:.2g}" for bar in bars)
    parts = [
        Markup('<svg class="chart" role="img" viewBox="0 0 {} {}" aria-label="{}">').format(
            _LEFT + _PLOT + _END,
            height,
            f"Error and rounding noise, relative: {told}",
        ),
        axis.grid(_HEAD, height),
    ]
    for number, bar in enumerate(bars):
        top, long = _HEAD + _ROW * number, axis.length(bar.error)
        parts.append(
            Markup(
                '<text class="name" x="{}" y="{}">{}</text>'
                '<rect class="error" x="{}" y="{}" width="{:.1f}" height="9"/>'
                '<rect class="noise" x="{}" y="{}" width="{:.1f}" height="6"/>'
                '<text class="value" x="{:.1f}" y="{}">{}</text>'
            ).format(
                _LEFT - 8, top + 16, bar.name, _LEFT, top + 4, long, _LEFT, top + 15,
                axis.length(bar.noise), _LEFT + long + 6, top + 13, f"{bar.error:.2g}",
            )
        )  # fmt: skip
    return joined([*parts, Markup("</svg>")])


def _bar(finding: Finding, where: bool) -> _Bar | None:
    metrics, noise = finding.metrics, finding.noise
    if metrics is None or not metrics.reference_rms > 0 or not math.isfinite(metrics.reference_rms):
        return None
    error = metrics.rmse / metrics.reference_rms
    floor = 0.0 if noise is None else noise.rms / metrics.reference_rms
    if not (math.isfinite(error) and math.isfinite(floor) and error > 0):
        return None
    region = f" of {finding.region}" if where else ""
    return _Bar(fits_subject(f"{finding.subject}{region}", _LONGEST), error, floor)
