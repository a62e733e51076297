"""What a report says and in which order, as plain text parts. Text, terminal and HTML only lay this out."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from checked_backend.findings import Coverage, Finding, Kind, Metrics, NoiseScale, RegionInfo, Severity, Verdict
from checked_backend.report.advice import PROGRAM_RUNS, advise
from checked_backend.report.layout import layout_sentence

if TYPE_CHECKING:
    from checked_backend.report.report import Report

__all__ = ["FindingView", "ReportView", "Row", "clean", "sections", "view"]

_SHOWN_FINDINGS = 10
_SHOWN_LINES = 20

# Terminal escapes, other control characters, line separators, halves of surrogate pairs and bidirectional overrides:
# a name from a stranger's file must not be able to rewrite what a person reads.
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class Row:
    """A labelled line. ``code`` is for pasting: it must not be wrapped."""

    label: str
    text: str
    code: bool = False


@dataclass(frozen=True, slots=True)
class FindingView:
    """One finding, laid out."""

    title: str
    message: str
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True)
class ReportView:
    """One report, laid out. Empty parts are not shown."""

    verdict: Verdict
    sentence: str
    title: str
    path: str
    findings: tuple[FindingView, ...]
    more: str
    advice: tuple[str, ...]
    checked: tuple[str, ...]
    skipped: tuple[str, ...]
    ignored: tuple[str, ...]
    notes: tuple[str, ...]
    environment: tuple[str, ...]


def clean(text: str) -> str:
    """Return text with every character that could steer a terminal or a browser's text direction written out."""
    text = text.replace("\r\n", "\n").expandtabs(4)
    return _UNSAFE.sub(lambda match: match[0].encode("unicode_escape", "surrogatepass").decode("ascii"), text)


def view(report: Report) -> ReportView:
    """Lay a report out."""
    coverage = report.coverage
    # What fails comes first; a warning that was found before it would push it off the screen.
    findings = sorted(report.findings, key=lambda finding: finding.severity is Severity.WARNING)
    nothing_checked = not any(count > 0 for count in coverage.checked.values())
    nothing_compiled = bool(coverage.checked.get(PROGRAM_RUNS)) and not coverage.regions
    advice = advise(
        report.findings,
        verdict=report.verdict,
        nothing_checked=nothing_checked,
        nothing_compiled=nothing_compiled,
        skipped=any(skip.matters for skip in coverage.skipped),
        localized=any(finding.op or finding.stage for finding in report.findings)
        or any("localized" in note for note in coverage.notes),
    )
    return ReportView(
        verdict=report.verdict,
        sentence=_sentence(report, nothing_checked, nothing_compiled),
        title=clean(report.title),
        path="" if report.path is None else clean(str(report.path)),
        findings=tuple(
            _finding(finding, number, len(findings)) for number, finding in enumerate(findings[:_SHOWN_FINDINGS], 1)
        ),
        more=_more(findings[_SHOWN_FINDINGS:]),
        advice=advice,
        checked=_cut([*_counts(coverage), *map(_region, coverage.regions), *_limits(coverage)]),
        skipped=_cut(_skips(coverage)),
        ignored=_cut([f"{_what(finding)}: {_first_line(finding.message)}" for finding in coverage.ignored]),
        notes=_cut([clean(note) for note in coverage.notes]),
        environment=tuple(f"{clean(key)} {clean(value)}" for key, value in report.environment.items()),
    )


def sections(parts: ReportView) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Return the headed lists that follow the findings, in order; those that are empty are left out."""
    environment = ("; ".join(parts.environment),) if parts.environment else ()
    for heading, entries in (
        ("What to do next", parts.advice),
        ("Checked", parts.checked),
        ("Not checked", parts.skipped),
        ("Ignored, as you asked", parts.ignored),
        ("Notes", parts.notes),
        ("Environment", environment),
    ):
        if entries:
            yield heading, entries


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _cut(lines: list[str]) -> tuple[str, ...]:
    rest = len(lines) - _SHOWN_LINES
    return tuple(lines) if rest <= 0 else (*lines[:_SHOWN_LINES], f"and {rest} more; the JSON report lists them all")


# -- the first line --------------------------------------------------------------------------------------------------

# Said when every finding that fails is of one of these kinds; the first row that fits.
_FAILURES: tuple[tuple[frozenset[Kind], str], ...] = (
    (frozenset({Kind.CRASH}), "the compiled program does not run where eager does"),
    (frozenset({Kind.CRASH, Kind.EXCEPTION}), "the compiled program does not raise as eager does"),
    (frozenset({Kind.PRECISION}), "the compiled program is less precise than eager"),
    (frozenset(Kind), "the compiled program is wrong"),
)


def _sentence(report: Report, nothing_checked: bool, nothing_compiled: bool) -> str:
    verdict = report.verdict
    warnings = [finding for finding in report.findings if finding.severity is Severity.WARNING]
    if verdict is Verdict.PASS:
        said = layout_sentence(warnings) if warnings else "the compiled program agrees with eager"
        return f"{said} ({', '.join(_counts(report.coverage))})"
    if verdict is Verdict.FAIL:
        failing = [finding for finding in report.findings if finding.fails]
        if all(finding.is_layout for finding in report.findings) and not _missed(report.coverage):
            return layout_sentence(failing)
        kinds = {finding.kind for finding in failing}
        said = next(words for fitting, words in _FAILURES if kinds <= fitting)
        regions = {finding.region for finding in failing if finding.region}
        where = f" in {_plural(len(regions), 'region')}" if regions else ""
        return f"{said}: {_plural(len(failing), 'finding')}{where}"
    reasons = []
    if len(report.findings) > len(warnings):
        reasons.append(f"{_plural(len(report.findings) - len(warnings), 'finding')} could not be decided")
    missed = _missed(report.coverage) - nothing_compiled  # that is one of them
    if missed:
        reasons.append(f"{_plural(missed, 'part')} that could hide an error {'was' if missed == 1 else 'were'} skipped")
    if nothing_checked:
        reasons.append("nothing was checked")
    if nothing_compiled:
        reasons.insert(0, "nothing was compiled")
    return " and ".join(reasons)


def _missed(coverage: Coverage) -> int:
    """How many parts were skipped in which an error could hide."""
    return sum(skip.matters for skip in coverage.skipped)


# -- findings --------------------------------------------------------------------------------------------------------


_HEADS = {Severity.ERROR: "Finding", Severity.WARNING: "Warning"}


def _what(finding: Finding) -> str:
    kind = finding.kind.value
    detail = finding.detail if finding.detail.startswith(kind) else f"{kind} {finding.detail}".strip()
    return f"{clean(detail)}, {_first_line(finding.subject)}"


def _first_line(text: str) -> str:
    return clean(text).partition("\n")[0]


def _finding(finding: Finding, number: int, total: int) -> FindingView:
    rows = [_row("expected", finding.expected), _row("actual", finding.actual)]
    if finding.metrics is not None:
        rows.extend(_metrics(finding.metrics))
    if finding.noise is not None:
        rows.extend(_noise(finding.noise, finding.metrics))
    rows.extend(Row("evidence", f"{clean(str(key))}: {clean(str(value))}") for key, value in finding.evidence.items())
    place = (finding.graph and f"{finding.graph} graph", finding.stage and f"stage {finding.stage}", finding.node)
    rows.append(_row("where", ", ".join(part for part in (finding.region, *place, finding.op) if part)))
    rows.append(_row("your line" if _is_line_blamed(finding) else "made at", finding.source, code=True))
    rows.append(_row("workaround", finding.workaround, code=True))
    rows.append(_row("repro", finding.repro, code=True))
    return FindingView(
        title=f"{_HEADS[finding.severity]} {number} of {total}: {_what(finding)}",
        message=clean(finding.message),
        rows=tuple(row for row in rows if row is not None and row.text),
    )


def _is_line_blamed(finding: Finding) -> bool:
    """Whether a line is at fault: that of wrong values is where they were made, until an operator is named."""
    of_values = (Kind.LOGIC, Kind.PRECISION, Kind.NONFINITE, Kind.MUTATION)
    return finding.op is not None or finding.kind not in of_values


def _row(label: str, text: str | None, *, code: bool = False) -> Row | None:
    return None if text is None else Row(label, clean(text), code)


def _metrics(metrics: Metrics) -> list[Row]:
    if metrics.mismatched == 0:
        return [Row("difference", f"none in {_plural(metrics.total, 'element')}")]
    share = f"{100 * metrics.mismatched / max(metrics.total, 1):.3g}%"
    ulp = "" if metrics.max_ulp is None else f", {metrics.max_ulp} ulp"
    rows = [
        Row("difference", f"{metrics.mismatched} of {_plural(metrics.total, 'element')} ({share})"),
        Row("greatest", f"absolute {metrics.max_abs_diff:.4g}, relative {metrics.max_rel_diff:.4g}{ulp}"),
        Row("rms", f"{metrics.rmse:.4g} of the difference, {metrics.reference_rms:.4g} of the reference"),
    ]
    if metrics.index is not None:
        reference, candidate = _values(metrics)
        rows.append(Row("at index", f"{list(metrics.index)}: reference {reference}, candidate {candidate}"))
    if metrics.nonfinite_mismatched:
        counts = (
            f"reference {metrics.nan_reference} NaN, {metrics.inf_reference} infinite; "
            f"candidate {metrics.nan_candidate} NaN, {metrics.inf_candidate} infinite"
        )
        rows.append(Row("nonfinite", f"{_plural(metrics.nonfinite_mismatched, 'element')} on one side only; {counts}"))
    return rows


def _values(metrics: Metrics) -> tuple[str, str]:
    reference, candidate = metrics.reference_value, metrics.candidate_value
    if isinstance(reference, float) and isinstance(candidate, float):
        # Nine digits tell any two float32 numbers apart; float64 may need them all.
        short = f"{reference:.9g}", f"{candidate:.9g}"
        return short if short[0] != short[1] else (repr(reference), repr(candidate))
    return str(reference), str(candidate)


def _noise(noise: NoiseScale, metrics: Metrics | None) -> list[Row]:
    times = ""
    if metrics is not None and noise.max > 0 and metrics.max_abs_diff > 0:
        times = f"; the greatest difference is {metrics.max_abs_diff / noise.max:.3g} times that"
    return [
        Row("noise", f"rms {noise.rms:.4g}, greatest {noise.max:.4g}{times}"),
        Row("noise from", clean(noise.source)),
    ]


def _more(rest: Sequence[Finding]) -> str:
    if not rest:
        return ""
    kinds = Counter(finding.kind.value for finding in rest)
    counted = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
    return f"and {_plural(len(rest), 'more finding')}: {counted}; the JSON report lists them all"


# -- coverage --------------------------------------------------------------------------------------------------------


def _counts(coverage: Coverage) -> list[str]:
    return [f"{clean(what)}: {count}" for what, count in coverage.checked.items() if count > 0]


def _region(region: RegionInfo) -> str:
    lines = f"; {', '.join(region.sources[:3])}" if region.sources else ""
    backwards = f", {_plural(region.checked_backwards, 'backward')}" if region.checked_backwards else ""
    checked = f"{region.checked_calls} of {_plural(region.calls, 'call')}{backwards} checked"
    if 0 < region.last_checked_call < region.calls:
        checked += f", the last at call {region.last_checked_call}"
    return clean(f"{region.name}: {_plural(region.nodes, 'node')}, {checked}{lines}")


def _limits(coverage: Coverage) -> list[str]:
    """Return the subjects on which the check was bluntest: there an error could be largest and still unseen."""
    worst = sorted(coverage.detection_limit.items(), key=lambda item: -item[1])[:3]
    lines = []
    for subject, limit in worst:
        own = coverage.own_precision_limit.get(subject, 0.0)
        hidden = f"; one that float64 does not show (a kernel's own, or Dynamo's) is hidden up to {own:.2g}"
        told = f"{clean(subject)}: a relative error above {limit:.2g} would have been caught"
        lines.append(told + (hidden if own > limit else ""))
    return lines


def _skips(coverage: Coverage) -> list[str]:
    """Return each thing that was skipped once, those that matter first."""
    regions: dict[tuple[bool, str, str], list[str]] = {}
    for skip in sorted(coverage.skipped, key=lambda skip: not skip.matters):
        regions.setdefault((skip.matters, skip.subject, skip.reason), []).append(skip.region)
    lines = []
    for (matters, subject, reason), names in regions.items():
        named = sorted({name for name in names if name and name not in subject})
        where = f" in {named[0]}" if len(named) == 1 else f" in {len(named)} regions" if named else ""
        hidden = " (an error could hide there)" if matters else ""
        lines.append(clean(f"{subject}{where}: {reason}{hidden}"))
    return lines
