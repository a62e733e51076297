"""The parts of a report in their order, as plain text. Text, terminal and HTML only lay them out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from checked_backend.findings import EvidenceKey, Finding, Severity, Verdict
from checked_backend.findings.paths import shown_path
from checked_backend.report.advice import CANDIDATE, TENSORS_OF_BOTH_RUNS, advise, layout_sentence, nothing_done
from checked_backend.report.causes import Cause, causes_of, place_of, short_region, worst_first
from checked_backend.report.clean import clean, first_line, listed, plural
from checked_backend.report.coverage_view import (
    but_for_ignored,
    counts,
    coverage_line,
    first_missed,
    limits,
    missed,
    region_line,
    skips,
)
from checked_backend.report.details import FindingView, Row, finding_view, how_wrong, row, values_at, what
from checked_backend.report.one_line import is_line_blamed, line_label, one_line, operator_words, user_line
from checked_backend.report.words import named, of_candidate, plain_names, stage_words, with_texts, words_of

if TYPE_CHECKING:
    from checked_backend.report.report import Report

_SHOWN_CAUSES = 10
_SHOWN_RESULTS = 8
_SHOWN_LINES = 20
_SHORT_LINES = 5

_TOLD = (
    *(EvidenceKey.EXPLAINS, EvidenceKey.AT_FAULT, EvidenceKey.BROKEN_BY, EvidenceKey.LOCALIZED, EvidenceKey.STOPPED),
    *(EvidenceKey.WORKAROUND, EvidenceKey.REPRO, EvidenceKey.HOST, EvidenceKey.DEVICE, EvidenceKey.TIME),
    *(EvidenceKey.WHERE, EvidenceKey.ONE_KERNEL, EvidenceKey.BUG_REPORT),
)
"""The evidence that a person needs at once. The verbose report has all of it."""


@dataclass(frozen=True, slots=True)
class CauseView:
    """One root cause, laid out.

    Attributes:
        title: The operator or the result, and where.
        line: The line of code, or "".
        line_label: Whether it is the user's line, or a library's.
        code: Its text, or "".
        sentence: What kind of problem it is, in plain words.
        results: What it makes wrong, and how far; of many the worst.
        rows: What matters of the rest.
    """

    title: str
    line: str
    line_label: str
    code: str
    sentence: str
    message: str
    results: tuple[str, ...]
    rows: tuple[Row, ...]
    findings: tuple[FindingView, ...]
    is_warning: bool = False


@dataclass(frozen=True, slots=True)
class ReportView:
    """One report, laid out. Empty parts are not shown."""

    verdict: Verdict
    sentence: str
    heading: str
    title: str
    path: str
    causes: tuple[CauseView, ...]
    more: str
    advice: tuple[str, ...]
    coverage: str
    checked: tuple[str, ...]
    bluntest: tuple[str, ...]
    missed: tuple[str, ...]
    skipped: tuple[str, ...]
    ignored: tuple[str, ...]
    notes: tuple[str, ...]
    environment: tuple[str, ...]

    @property
    def findings(self) -> tuple[FindingView, ...]:
        """The findings of all causes that are shown: pages of several reports have them in a row."""
        return tuple(finding for cause in self.causes for finding in cause.findings)


def view(report: Report) -> ReportView:
    """Lay a report out."""
    coverage = report.coverage
    causes = causes_of(report.findings)
    rest = Counter(finding.kind.value for cause in causes[_SHOWN_CAUSES:] for finding in cause.findings)
    counted = ", ".join(f"{count} {kind}" for kind, count in rest.most_common())
    parts = ReportView(
        verdict=report.verdict,
        sentence=headline(report),
        heading=headline(report, remedies=False),
        title=_title(report, causes),
        path="" if report.path is None else clean(shown_path(str(report.path))),
        causes=tuple(_causes(causes[:_SHOWN_CAUSES], len(report.findings))),
        more=f"and {plural(rest.total(), 'more finding')}: {counted}; the JSON report lists them all" if rest else "",
        advice=advise(report, [cause.main for cause in causes]),
        coverage=coverage_line(coverage),
        checked=_cut([*counts(coverage), *map(region_line, coverage.regions)]),
        bluntest=tuple(limits(coverage)),
        missed=_cut(skips(coverage, all_of_them=False)),
        skipped=_cut(skips(coverage)),
        ignored=_cut([f"{what(finding)}: {first_line(finding.message)}" for finding in coverage.ignored]),
        notes=_cut([clean(note) for note in coverage.notes]),
        environment=tuple(f"{clean(key)} {clean(value)}" for key, value in report.environment.items()),
    )
    laid_out: ReportView = with_texts(parts, of_candidate) if CANDIDATE in report.environment else parts
    return laid_out


def sections(parts: ReportView, *, short: bool = False) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Return the headed lists that follow the findings, in order; those that are empty are left out.

    Args:
        short: Return those that a person needs at once, and of each the first lines.
    """
    whole = (
        ("What to do next", parts.advice),
        ("Checked", () if short else parts.checked),
        ("Where an error could be greatest and unseen", () if short else parts.bluntest),
        ("Not checked", parts.missed if short else parts.skipped),
        ("Ignored, as you asked", () if short else parts.ignored),
        ("Notes", parts.notes),
        ("Environment", () if short else tuple(filter(None, ["; ".join(parts.environment)]))),
    )
    for heading, entries in whole:
        rest = len(entries) - _SHORT_LINES if short else 0
        if entries:
            yield heading, entries if rest <= 1 else (*entries[:_SHORT_LINES], f"and {rest} more")


def _cut(lines: list[str]) -> tuple[str, ...]:
    rest = len(lines) - _SHOWN_LINES
    return tuple(lines) if rest <= 0 else (*lines[:_SHOWN_LINES], f"and {rest} more; the JSON report lists them all")


# -- the first two lines ---------------------------------------------------------------------------------------------


def headline(report: Report, *, remedies: bool = True) -> str:
    """The first line after the verdict: the worst cause, with repro and workaround, or a sentence if there is none."""
    said = plain_names(_headline(report, remedies=remedies))
    return of_candidate(said) if CANDIDATE in report.environment else said


def _headline(report: Report, *, remedies: bool) -> str:
    verdict = report.verdict
    warnings = [finding for finding in report.findings if finding.severity is Severity.WARNING]
    if verdict is Verdict.PASS:
        of_layout = [finding for finding in warnings if finding.is_layout]
        said = "the compiled program agrees with eager"
        if of_layout:
            said = layout_sentence(of_layout)
        elif TENSORS_OF_BOTH_RUNS in report.coverage.checked:
            said = "the second run stays within the noise of the first"
        if len(of_layout) < len(warnings):
            said += "; it refuses arguments in another layout"
        said += but_for_ignored(report.coverage)
        return f"{said} ({listed(counts(report.coverage))})"
    if verdict is Verdict.FAIL:
        failing = [finding for finding in report.findings if finding.fails]
        if all(finding.is_layout for finding in report.findings) and not missed(report.coverage):
            return layout_sentence(failing)
        causes = causes_of(failing)
        noun = "other cause" if all(cause.is_named for cause in causes) else "other part"
        more = f"; {plural(len(causes) - 1, noun)} below" if len(causes) > 1 else ""
        return one_line(causes[0], remedies=remedies) + more
    reasons = []
    if len(report.findings) > len(warnings):
        reasons.append(f"{plural(len(report.findings) - len(warnings), 'finding')} could not be decided")
    nothing_checked, nothing_compiled = nothing_done(report)
    parts = missed(report.coverage) - nothing_compiled  # that is one of them
    if parts:
        reasons.append(f"{plural(parts, 'part')} that could hide an error {'was' if parts == 1 else 'were'} skipped")
        if not nothing_compiled and parts == missed(report.coverage):
            reasons[-1] += f" ({'the first: ' * (parts > 1)}{first_missed(report.coverage)})"
    if nothing_checked:
        reasons.append("nothing was checked")
    if nothing_compiled:
        reasons.insert(0, "nothing was compiled")
    return " and ".join(reasons)


def _title(report: Report, causes: Sequence[Cause]) -> str:
    title = short_region(clean(report.title))
    if not report.findings:
        return title
    regions = {finding.region for finding in report.findings if finding.region}
    where = f" in {plural(len(regions), 'region')}" if len(regions) > 1 else ""
    of, are_named = "", [cause.is_named for cause in causes]
    if len(report.findings) > 1:  # how many causes there are, as far as that is known
        noun = "cause" if all(are_named) else "part"
        of = f", {plural(len(causes), noun)}" if any(are_named) else ", no operator named"
    said = f"{plural(len(report.findings), 'finding')}{where}{of}"
    return f"{title}: {said}" if title else said


# -- causes ----------------------------------------------------------------------------------------------------------


def _causes(causes: Sequence[Cause], total: int) -> Iterator[CauseView]:
    begun = 1
    for number, cause in enumerate(causes, 1):
        details = tuple(finding_view(one, at, total) for at, one in enumerate(cause.findings, begun))
        yield _cause(cause, number, details)
        begun += len(cause.findings)


def _cause(cause: Cause, number: int, details: tuple[FindingView, ...]) -> CauseView:
    main = cause.main
    line = user_line(main.source) if is_line_blamed(main) else None
    results = tuple(dict.fromkeys(_results(cause)))
    rest = len(results) - _SHOWN_RESULTS
    shown = results if rest <= 1 else (*results[:_SHOWN_RESULTS], f"and {rest} more; report -v lists them all")
    return CauseView(
        title=f"{number}. {_cause_title(cause)}",
        line="" if line is None else clean(f"{line.place} in {line.function}" if line.function else line.place),
        line_label=line_label(main),
        code="" if line is None else clean(line.code),
        sentence=words_of(main)[1],
        message=clean(main.message),
        results=shown,
        rows=tuple(_rows(cause, quoted=line is not None)),
        findings=details,
        is_warning=cause.is_warning,
    )


def _results(cause: Cause) -> Iterator[str]:
    """What a cause makes wrong: the first in full, of the others what differs, so that each is a line."""
    main = cause.main
    are_cut = len(cause.findings) > _SHOWN_RESULTS + 1
    told = [main, *(one for one in worst_first(cause.findings) if one is not main)] if are_cut else cause.findings
    before: Finding | None = None
    for one in sorted(told, key=lambda one: one.op is None):  # those that were traced to it come first
        is_alike = before is not None and (before.kind, before.detail) == (one.kind, one.detail)
        said = first_line(one.subject) if is_alike else what(one)
        far = how_wrong(one, briefly=before is not None) if len(cause.findings) > 1 or one.metrics else ""
        region = f" of {clean(one.region)}" if one.region != main.region else ""
        yield f"{said}{region}{f': {far}' if far else ''}"
        before = one


def _cause_title(cause: Cause) -> str:
    main = cause.main
    graded = "warning: " if cause.is_warning else ""
    if main.op is not None:
        said = f"{operator_words(cause)} ({main.op})"
    else:
        subjects = cause.subjects
        more = f" and {plural(len(subjects) - 1, 'other result')}" if len(subjects) > 1 else ""
        said = f"{named(main.subject)}{more}"
    regions = f"{cause.regions} regions" if cause.regions > 1 and not cause.is_named else ""
    where = ", ".join(part for part in (place_of(main), regions, stage_words(main)) if part)
    return clean(f"{graded}{said}{f' in {where}' if where else ''}")


def _rows(cause: Cause, *, quoted: bool) -> Iterator[Row]:
    main = cause.main
    if cause.assumed:
        told = f"{plural(cause.assumed, 'finding')} of the same code, whose own operator is not known"
        yield Row("assumed", f"that it explains {told}; check again when it is mended")
    rows = [
        row("greatest", values_at(main)),
        row("expected", main.expected),
        row("actual", main.actual),
        row(line_label(main), None if quoted else main.source),
        row("your line", main.caller),
    ]
    evidence = {key: _listed(main.evidence[key]) for key in _TOLD if key in main.evidence}
    for file in evidence.keys() & {EvidenceKey.BUG_REPORT, EvidenceKey.ONE_KERNEL}:
        evidence[file] = shown_path(evidence[file])
    rows += [row(key.replace("_", " "), said) for key, said in evidence.items()]
    rows.append(row("workaround", main.workaround, code=True))
    script = "repro" if main.repro_confirmed else "script"  # the evidence says that it does not show it
    rows.append(row(script, main.repro and f"python {shown_path(main.repro)}", code=True))
    yield from (one for one in rows if one is not None and one.text)


def _listed(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
