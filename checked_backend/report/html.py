"""Reports as one HTML page that needs nothing but itself."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from checked_backend.findings import Coverage, EvidenceKey, Finding, WorstElement
from checked_backend.report.causes import Cause, causes_of, several_regions, worst_first
from checked_backend.report.clean import clean, first_line, plural
from checked_backend.report.details import kernel_words, side_by_side, told_apart
from checked_backend.report.flow_chart import flow_chart, flow_sentence
from checked_backend.report.pictures import error_chart
from checked_backend.report.tensor_pictures import heat_map, heat_words, histogram
from checked_backend.report.view import CauseView, ReportView, sections, view

if TYPE_CHECKING:
    from checked_backend.report.report import Report

__all__ = ["render_fragment", "render_html"]

_SHOWN_LIMITS = 200
_SHOWN_VALUES = 8
_SHOWN_TENSORS = 4
_BREAKS = re.compile(r"(?<=[\w\]][./_])(?=[A-Za-z])")


@dataclass(frozen=True, slots=True)
class _Tensor:
    """One result, element by element.

    Attributes:
        name: The result.
        map: The places that differ; None if that cannot be drawn.
        map_words: The same in words.
        histogram: How many elements differ by how much; None where the dtype has no units in the last place.
        rows: The worst elements: their place, eager's value, the compiled one, eager's in float64.
    """

    name: str
    map: Markup | None
    map_words: str
    histogram: Markup | None
    rows: tuple[tuple[str, str, str, str], ...]


@dataclass(frozen=True, slots=True)
class _Code:
    """The generated code of the operator.

    Attributes:
        title: Its name, its language and what it computes; or why there is no code.
        text: The code, or "".
        more: What of it is not shown, or "".
    """

    title: str
    text: str = ""
    more: str = ""


@dataclass(frozen=True, slots=True)
class _Drawn:
    """A cause with its pictures.

    Attributes:
        view: What is said of it.
        chart: Its results' errors; None where there are no numbers.
        values: The place where each result differs most: its name, eager's value, the compiled one, the difference.
        flow: How the error flows through the graph; None where that is not known.
        flow_words: The same in words.
        code: The generated code of its operator; None where it was not looked for.
        tensors: The results whose elements are drawn.
    """

    view: CauseView
    chart: Markup | None
    values: tuple[tuple[str, str, str, str], ...]
    flow: Markup | None
    flow_words: str
    code: _Code | None
    tensors: tuple[_Tensor, ...]


@dataclass(frozen=True, slots=True)
class _Limit:
    """The smallest errors that would have been caught in one tensor."""

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
    environment.filters["breakable"] = _breakable
    return environment.get_template(template).render(sections=sections, **values)


def _breakable(text: str) -> Markup:
    """Text in which a long name or path may go on in the next line behind a dot, a slash or an underscore."""
    return Markup("<wbr>").join(map(escape, _BREAKS.split(text)))


def _part(report: Report) -> _Part:
    parts = view(report)
    causes = causes_of(report.findings)
    drawn = tuple(_drawn(said, cause) for said, cause in zip(parts.causes, causes, strict=False))  # more are counted
    limits = _limits(report.coverage)
    return _Part(parts, drawn, limits[:_SHOWN_LIMITS], max(0, len(limits) - _SHOWN_LIMITS))


def _drawn(said: CauseView, cause: Cause) -> _Drawn:
    worst, where = worst_first(cause.findings), several_regions(cause.findings)
    values = tuple(row for one in worst if (row := side_by_side(one, region=where)) is not None)[:_SHOWN_VALUES]
    flowing = next((finding for finding in cause.findings if finding.flow), None)
    return _Drawn(
        view=said,
        chart=error_chart(worst),
        values=values,
        flow=None if flowing is None else flow_chart(flowing.flow, flowing.node),
        flow_words="" if flowing is None else flow_sentence(flowing.flow, flowing.node),
        code=_code(cause.findings),
        tensors=tuple(_tensors(worst)),
    )


def _code(findings: Sequence[Finding]) -> _Code | None:
    kernel = next((finding.kernel for finding in findings if finding.kernel is not None), None)
    if kernel is None:
        why = next((said for one in findings if (said := one.evidence.get(EvidenceKey.GENERATED_CODE))), None)
        return None if why is None else _Code(first_line(f"Generated code: {why}"))
    more = [f"{plural(kernel.lines_left_out, 'more line')}"] if kernel.lines_left_out else []
    more += [f"computed again in {', '.join(map(first_line, kernel.others))}"] if kernel.others else []
    return _Code(kernel_words(kernel), clean(kernel.code), "; ".join(more))


def _tensors(findings: Sequence[Finding]) -> Iterator[_Tensor]:
    """The results of a cause that can be drawn, in the order of the findings."""
    where = several_regions(findings)
    for finding in [one for one in findings if one.distribution is not None][:_SHOWN_TENSORS]:
        if (found := finding.distribution) is not None:
            words = heat_words(found)
            name = f"{first_line(finding.subject)}{f' of {clean(finding.region)}' if where else ''}"
            yield _Tensor(name, heat_map(found), words, histogram(found), tuple(map(_element, found.worst)))


def _element(element: WorstElement) -> tuple[str, str, str, str]:
    exact = f"{element.float64:.12g}" if isinstance(element.float64, float) else str(element.float64 or "")
    return f"[{', '.join(map(str, element.index))}]", *told_apart(element.expected, element.actual), exact


def _limits(coverage: Coverage) -> tuple[_Limit, ...]:
    worst_first = sorted(coverage.detection_limit.items(), key=lambda item: -item[1])
    return tuple(
        _Limit(clean(subject), f"{limit:.2g}", "" if (own := _own(coverage, subject)) is None else f"{own:.2g}")
        for subject, limit in worst_first
    )


def _own(coverage: Coverage, subject: str) -> float | None:
    return coverage.own_precision_limit.get(subject)
