"""Certificates: Markdown that says what was checked, for somebody who asks whether compiled code can be trusted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from checked_backend.findings import RegionInfo, Verdict
from checked_backend.report.clean import clean, listed, percent, plural
from checked_backend.report.coverage_view import but_for_ignored, counts, region_line, skips
from checked_backend.report.details import what
from checked_backend.report.report import Report
from checked_backend.report.words import plain_names

_SHOWN = 30
_PROBABILITY = 0.95
_SAMPLED = (
    f"A fault in so many calls, above the detection limits, would have been seen with {_PROBABILITY:.0%} probability, "
    "assuming that such calls are spread over the run as the calls are that were drawn at random to be checked:"
)
_SAID = {
    Verdict.PASS: "The compiled program agrees with eager in everything that was compared{}.",
    Verdict.FAIL: "**This is no certificate: the compiled program differs from eager.**",
    Verdict.INCONCLUSIVE: "**This is no certificate: no verdict was possible.**",
}


def render_certificate(reports: Sequence[Report]) -> str:
    """Return reports as Markdown: the verdict, what was compared, with which detection limits, and on which versions.

    A report that is no pass says so in its first line, and names what was found or missed.
    """
    return "\n".join("\n".join(_certificate(report)) for report in reports)


def _certificate(report: Report) -> Iterator[str]:
    coverage = report.coverage
    yield f"## checked_backend: {report.verdict.value.upper()}{f' ({_text(report.title)})' if report.title else ''}"
    yield ""
    yield _SAID[report.verdict].format(but_for_ignored(coverage))
    if report.verdict is not Verdict.PASS:
        yield ""
        yield _text(report.headline)
    yield ""
    yield f"Compared: {_text(listed(counts(coverage)) or 'nothing')}."
    yield from _listed(map(region_line, coverage.regions), "region")
    drawn = [region for region in coverage.regions if region.drawn_calls]
    if drawn and report.verdict is Verdict.PASS:
        yield from ("", _SAMPLED, *_listed(map(_rarest_seen, drawn), "region"))
    yield ""
    yield from _limits(report)
    missed = skips(coverage)
    yield "Not checked:" if missed else "Nothing was skipped."
    yield from _listed(missed, "part")
    of_layout = report.findings if report.verdict is Verdict.PASS else ()
    for heading, findings in (
        ("Differs, with the same values:", of_layout),
        ("Differs, and is ignored by option:", coverage.ignored),
    ):
        if findings:
            yield from ("", heading, *_listed((f"{what(one)}: {one.message}" for one in findings), "finding"))
    yield ""
    yield "On: " + _text("; ".join(f"{name} {value}" for name, value in report.environment.items()) or "not recorded")
    yield ""


def _rarest_seen(region: RegionInfo) -> str:
    """How rare a fault may be that the drawn calls of a region would have shown: 1 - (1 - p)^n is the probability."""
    rarest = 1 - (1 - _PROBABILITY) ** (1 / region.drawn_calls)
    return f"{region.name}: in at least {percent(rarest)} of the calls ({plural(region.drawn_calls, 'call')} drawn)"


def _limits(report: Report) -> Iterator[str]:
    limits = report.coverage.detection_limit
    if not limits:
        yield "Each difference was held against the tensor's own noise; no detection limit had to be estimated."
        yield ""
        return
    yield "An error greater than this, relative to the tensor's root mean square, would have been caught:"
    yield ""
    yield "| tensor | of the logic | in its own precision |"
    yield "|---|---|---|"
    for subject, limit in sorted(limits.items(), key=lambda item: -item[1])[:_SHOWN]:
        own = report.coverage.own_precision_limit.get(subject)
        yield f"| {_text(subject)} | {limit:.2g} | {'' if own is None else f'{own:.2g}'} |"
    yield from _rest(len(limits), "tensor")
    yield ""


def _listed(texts: Iterable[str], noun: str) -> Iterator[str]:
    known = list(texts)
    yield from (f"- {_text(text)}" for text in known[:_SHOWN])
    yield from _rest(len(known), noun)


def _rest(count: int, noun: str) -> Iterator[str]:
    if count > _SHOWN:
        yield f"- and {plural(count - _SHOWN, f'more {noun}')}, with smaller numbers or less to say"


def _text(text: str) -> str:
    """Text in one line that Markdown shows as it is."""
    text = plain_names(clean(text)).replace("\n", " ")
    for character in "\\`*_<>|[]#&":
        text = text.replace(character, f"\\{character}")
    return text
