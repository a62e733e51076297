"""Reports as one HTML page that needs nothing but itself."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jinja2 import Environment, PackageLoader, StrictUndefined

from checked_backend.report.clean import clean
from checked_backend.report.view import sections, view

if TYPE_CHECKING:
    from checked_backend.report.report import Report

__all__ = ["render_fragment", "render_html"]


def render_html(reports: Sequence[Report], broken: Sequence[tuple[Path, str]] = ()) -> str:
    """Return reports as one self-contained HTML page: no scripts, nothing loaded from elsewhere.

    Args:
        reports: The reports, in the order in which to show them.
        broken: Files that could not be read, and why; listed on the page.

    Returns:
        The page. Every text of the reports is escaped.
    """
    environment = Environment(
        loader=PackageLoader("checked_backend.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    laid_out = [view(report) for report in reports]
    heading = f"{len(reports)} reports"
    if len(laid_out) == 1:
        heading = f"{laid_out[0].verdict.value.upper()}: {laid_out[0].title or laid_out[0].sentence}"
    return environment.get_template("report.html.j2").render(
        heading=heading,
        reports=laid_out,
        broken=[(clean(str(path)), clean(reason)) for path, reason in broken],
        sections=sections,
    )


def render_fragment(report: Report) -> str:
    """Return one report as a part of a page, for a notebook."""
    return render_html([report])
