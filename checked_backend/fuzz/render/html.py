"""Render the findings of fuzzing as one self-contained HTML page without scripts."""

from __future__ import annotations

from dataclasses import dataclass

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

from checked_backend.errors import CheckedBackendError
from checked_backend.fuzz.render.issue import render_issue
from checked_backend.fuzz.render.summary import MEANING, Shown, Summary
from checked_backend.fuzz.render.text import ways
from checked_backend.fuzz.text import describe_inputs, render_function
from checked_backend.report import Report
from checked_backend.report.clean import clean
from checked_backend.report.view import ReportView, view

__all__ = ["render_html"]

_COLOURS = {"new": "fail", "known": "inconclusive", "documented": "quiet", "unconfirmed": "quiet"}
_SHOWN = 50


@dataclass(frozen=True, slots=True)
class _Section:
    """A group's section."""

    shown: Shown
    colour: str
    code: str
    ways: str
    issue: str
    report: ReportView | None


def render_html(summary: Summary) -> str:
    """Return a database as one HTML page: a table of groups, then each with program, findings, script and issue text.

    Nothing is loaded from elsewhere, nothing in it runs, and every text is escaped.
    """
    environment = Environment(
        loader=ChoiceLoader([PackageLoader("checked_backend.fuzz.render"), PackageLoader("checked_backend.report")]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["clean"] = clean
    return environment.get_template("fuzz.html.j2").render(
        summary=summary,
        sections=[_section(shown, summary) for shown in summary.groups],
        standings=[word for word in MEANING if any(shown.standing == word for shown in summary.groups)],
        meaning=MEANING,
        gone=summary.gone[:_SHOWN],
        undecided=summary.undecided[:_SHOWN],
    )


def _section(shown: Shown, summary: Summary) -> _Section:
    group = shown.group
    inputs = "".join(f"# {line}\n" for line in describe_inputs(group.program))
    return _Section(
        shown,
        _COLOURS[shown.standing],
        inputs + render_function(group.program),
        ways(shown),
        render_issue(group, summary.settings),
        _view(group.result.report),
    )


def _view(text: str) -> ReportView | None:
    """The check's report; None if there is none, or it cannot be read."""
    if not text:
        return None
    try:
        return view(Report.from_json(text))
    except CheckedBackendError:
        return None
