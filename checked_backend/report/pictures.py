"""Pictures of numbers, as SVG in a page: how far each result is off, and what its rounding noise would explain."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from checked_backend.findings import Finding
from checked_backend.report.clean import first_line

__all__ = ["error_chart"]

_MOST = 24
_LONGEST = 34
_ROW, _LABEL, _PLOT, _END = 26, 250, 420, 90
_HEAD = 22


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
    bars = [bar for finding in findings if (bar := _bar(finding)) is not None][:_MOST]
    if not bars:
        return None
    numbers = [number for bar in bars for number in (bar.error, bar.noise) if number > 0]
    low = math.floor(math.log10(min(numbers))) - 1
    high = max(math.ceil(math.log10(max(numbers))), low + 2)

    def place(number: float) -> float:
        return 0.0 if number <= 0 else max(2.0, _PLOT * (math.log10(number) - low) / (high - low))

    height = _HEAD + _ROW * len(bars) + 6
    told = "; ".join(f"{bar.name}: error {bar.error:.2g}, noise {bar.noise:.2g}" for bar in bars)
    parts = [
        Markup('<svg class="chart" role="img" viewBox="0 0 {} {}" aria-label="{}">').format(
            _LABEL + _PLOT + _END, height, f"Error and rounding noise, relative: {told}"
        )
    ]
    step = max(1, (high - low) // 6)
    for power in range(low, high + 1, step):
        x = _LABEL + _PLOT * (power - low) / (high - low)
        parts.append(
            Markup(
                '<line class="grid" x1="{0}" x2="{0}" y1="{1}" y2="{2}"/><text class="tick" x="{0}" y="14">1e{3}</text>'
            ).format(f"{x:.1f}", _HEAD, height, power)
        )
    for number, bar in enumerate(bars):
        y = _HEAD + _ROW * number + 4
        parts.append(
            Markup(
                '<text class="name" x="{}" y="{}">{}</text>'
                '<rect class="error" x="{}" y="{}" width="{:.1f}" height="9"/>'
                '<rect class="noise" x="{}" y="{}" width="{:.1f}" height="6"/>'
                '<text class="value" x="{:.1f}" y="{}">{}</text>'
            ).format(
                _LABEL - 8, y + 12, bar.name, _LABEL, y, place(bar.error), _LABEL, y + 11, place(bar.noise),
                _LABEL + place(bar.error) + 6, y + 9, f"{bar.error:.2g}",
            )
        )  # fmt: skip
    parts.append(Markup("</svg>"))
    return Markup("").join(parts)


def _bar(finding: Finding) -> _Bar | None:
    metrics, noise = finding.metrics, finding.noise
    if metrics is None or not metrics.reference_rms > 0 or not math.isfinite(metrics.reference_rms):
        return None
    error = metrics.rmse / metrics.reference_rms
    floor = 0.0 if noise is None else noise.rms / metrics.reference_rms
    if not (math.isfinite(error) and math.isfinite(floor) and error > 0):
        return None
    name = first_line(finding.subject)
    short = name if len(name) <= _LONGEST else f"{name[: _LONGEST - 12]}...{name[-9:]}"
    return _Bar(short, error, floor)
