"""Reports as one HTML page that needs nothing but itself."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from checked_backend.findings import EvidenceKey, Finding, WorstElement
from checked_backend.report.causes import causes_of, several_regions, worst_first
from checked_backend.report.charts import error_chart, heat_map, heat_words, histogram
from checked_backend.report.clean import clean, first_line, plural
from checked_backend.report.details import kernel_words, side_by_side, told_apart
from checked_backend.report.flow_chart import flow_chart, flow_sentence
from checked_backend.report.view import CauseView, ReportView, sections, view
from checked_backend.report.words import plain_names, with_texts

if TYPE_CHECKING:
    from checked_backend.report.report import Report

_SHOWN_LIMITS = 200
_SHOWN_VALUES = 8
_SHOWN_TENSORS = 4
_BREAKS = re.compile(r"(?<=[\w\]][./_])(?=[A-Za-z])")


def render_html(reports: Sequence[Report], broken: Sequence[tuple[Path, str]] = ()) -> str:
    """Return reports as one self-contained HTML page: no scripts, nothing loaded from elsewhere, every text escaped.

    Args:
        broken: Files that could not be read, and why; listed on the page.
    """
    parts = [_part(report) for report in reports]
    heading = f"{len(reports)} reports"
    if len(parts) == 1:
        only = parts[0]["view"]
        heading = f"{only.verdict.value.upper()}: {only.title or only.sentence}"
    told = [(clean(str(path)), clean(reason)) for path, reason in broken]
    return _render("page.html.j2", heading=heading, reports=parts, broken=told)


def render_fragment(report: Report) -> str:
    """Return one report as a part of a page, for a notebook; its styles touch nothing else there."""
    return _render("fragment.html.j2", reports=[_part(report)])


def _render(template: str, **values: Any) -> str:
    return page_environment("checked_backend.report").get_template(template).render(sections=sections, **values)


def page_environment(package: str) -> Environment:
    """The templates of a package, in which every text is escaped."""
    environment = Environment(
        loader=PackageLoader(package), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    # a long name or path may go on in the next line behind a dot, a slash or an underscore
    environment.filters["breakable"] = lambda text: Markup("<wbr>").join(map(escape, _BREAKS.split(text)))
    environment.filters["clean"] = clean
    return environment


def _part(report: Report) -> dict[str, Any]:
    """What the template shows of one report. Names that Dynamo makes up are only where all is told of a finding."""
    verbose = view(report)
    parts: ReportView = with_texts(verbose, plain_names)
    told = (replace(short, findings=long.findings) for short, long in zip(parts.causes, verbose.causes, strict=True))
    causes = zip(told, causes_of(report.findings), strict=False)  # more are counted
    limits = sorted(report.coverage.detection_limit.items(), key=lambda item: -item[1])
    own = report.coverage.own_precision_limit
    return {
        "view": replace(parts, bluntest=()),  # the table has them all
        "causes": [_drawn(said, cause.findings) for said, cause in causes],
        "limits": [
            (plain_names(clean(subject)), f"{limit:.2g}", f"{own[subject]:.2g}" if subject in own else "")
            for subject, limit in limits[:_SHOWN_LIMITS]
        ],
        "more_limits": max(0, len(limits) - _SHOWN_LIMITS),
    }


def _drawn(said: CauseView, findings: Sequence[Finding]) -> dict[str, Any]:
    """A cause with its pictures; None where there is nothing to draw."""
    findings = [replace(finding, region=plain_names(finding.region)) for finding in findings]
    worst, where = worst_first(findings), several_regions(findings)
    inside = [one for one in worst if one.distribution is not None][:_SHOWN_TENSORS]  # with their worst elements
    rows = [row for one in worst if one not in inside and (row := side_by_side(one, region=where)) is not None]
    flowing = next((finding for finding in findings if finding.flow), None)
    return {
        "view": said,
        "chart": error_chart(worst),
        "worst_places": rows[:_SHOWN_VALUES],
        "flow": None if flowing is None else flow_chart(flowing.flow, flowing.node),
        "flow_words": "" if flowing is None else flow_sentence(flowing.flow, flowing.node),
        "code": _code(findings),
        "script": next((_script(one) for one in findings if one.repro and one.script), None),
        "tensors": list(_tensors(worst, where)),
    }


def _script(finding: Finding) -> tuple[str, str]:
    """The name of the repro's file, and what is in it, without halves of surrogate pairs, which no link can hold."""
    return clean(Path(finding.repro or "").name), (finding.script or "").encode("utf-8", "replace").decode("utf-8")


def _code(findings: Sequence[Finding]) -> dict[str, str] | None:
    """The generated code of the operator, or why there is none; None where it was not looked for."""
    kernel = next((finding.kernel for finding in findings if finding.kernel is not None), None)
    if kernel is None:
        why = next((said for one in findings if (said := one.evidence.get(EvidenceKey.GENERATED_CODE))), None)
        return None if why is None else {"title": first_line(f"Generated code: {why}"), "text": ""}
    more = [f"{plural(kernel.lines_left_out, 'more line')}"] if kernel.lines_left_out else []
    more += [f"computed again in {', '.join(map(first_line, kernel.others))}"] if kernel.others else []
    return {"title": kernel_words(kernel), "text": clean(kernel.code), "more": "; ".join(more)}


def _tensors(findings: Sequence[Finding], where: bool) -> Iterator[dict[str, Any]]:
    """The results of a cause that can be drawn, element by element, in the order of the findings."""
    drawn = [(one, one.distribution) for one in findings if one.distribution is not None]
    for finding, found in drawn[:_SHOWN_TENSORS]:
        yield {
            "name": f"{first_line(finding.subject)}{f' of {clean(finding.region)}' if where else ''}",
            "heat_map": heat_map(found),
            "heat_words": heat_words(found),
            "histogram": histogram(found),
            "rows": [_element(element) for element in found.worst],
        }


def _element(element: WorstElement) -> tuple[str, str, str, str]:
    exact = f"{element.float64:.12g}" if isinstance(element.float64, float) else str(element.float64 or "")
    return f"[{', '.join(map(str, element.index))}]", *told_apart(element.expected, element.actual), exact
