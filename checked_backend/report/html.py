"""Reports as one HTML page that needs nothing but itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from checked_backend.findings import Coverage
from checked_backend.report.causes import Cause, causes_of
from checked_backend.report.clean import clean
from checked_backend.report.details import side_by_side
from checked_backend.report.pictures import error_chart
from checked_backend.report.view import CauseView, ReportView, sections, view

if TYPE_CHECKING:
    from checked_backend.report.report import Report

__all__ = ["render_fragment", "render_html"]

_SHOWN_LIMITS = 200


@dataclass(frozen=True, slots=True)
class _Drawn:
    """A cause with its pictures.

    Attributes:
        view: What is said of it.
        chart: Its results' errors; None where there are no numbers.
        values: Of each result, where it differs most: its name, eager's value, the compiled one, the difference.
    """

    view: CauseView
    chart: Markup | None
    values: tuple[tuple[str, str, str, str], ...]


@dataclass(frozen=True, slots=True)
class _Limit:
    """What would have been caught in one tensor."""

    subject: str
    limit: str
    own: str


@dataclass(frozen=True, slots=True)
class _Part:
    """One report of a page."""

    view: ReportView
    causes: tuple[_Drawn, ...]
    limits: tuple[_Limit, ...]
    more_limits: int


def render_html(reports: Sequence[Report], broken: Sequence[tuple[Path, str]] = ()) -> str:
    """Return reports as one self-contained HTML page: no scripts, nothing loaded from elsewhere.

    Args:
        reports: The reports, in the order in which to show them.
        broken: Files that could not be read, and why; listed on the page.

    Returns:
        The page. Every text of the reports is escaped.
    """
    parts = [_part(report) for report in reports]
    heading = f"{len(reports)} reports"
    if len(parts) == 1:
        heading = f"{parts[0].view.verdict.value.upper()}: {parts[0].view.title or parts[0].view.sentence}"
    told = [(clean(str(path)), clean(reason)) for path, reason in broken]
    return _render("page.html.j2", heading=heading, reports=parts, broken=told)


def render_fragment(report: Report) -> str:
    """Return one report as a part of a page, for a notebook; its styles touch nothing else there."""
    return _render("fragment.html.j2", reports=[_part(report)])


def _render(template: str, **values: Any) -> str:
    environment = Environment(
        loader=PackageLoader("checked_backend.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template).render(sections=sections, **values)


def _part(report: Report) -> _Part:
    parts = view(report)
    causes = causes_of(report.findings)
    drawn = tuple(_drawn(said, cause) for said, cause in zip(parts.causes, causes, strict=False))  # more are counted
    limits = _limits(report.coverage)
    return _Part(parts, drawn, limits[:_SHOWN_LIMITS], max(0, len(limits) - _SHOWN_LIMITS))


def _drawn(said: CauseView, cause: Cause) -> _Drawn:
    values = tuple(row for finding in cause.findings[:8] if (row := side_by_side(finding)) is not None)
    return _Drawn(said, error_chart(cause.findings), values)


def _limits(coverage: Coverage) -> tuple[_Limit, ...]:
    worst_first = sorted(coverage.detection_limit.items(), key=lambda item: -item[1])
    return tuple(
        _Limit(clean(subject), f"{limit:.2g}", "" if (own := _own(coverage, subject)) is None else f"{own:.2g}")
        for subject, limit in worst_first
    )


def _own(coverage: Coverage, subject: str) -> float | None:
    return coverage.own_precision_limit.get(subject)
