"""What a fuzz found, as text, JSON, JUnit XML, one HTML page and issues to paste; and how a run is going."""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any
from xml.etree import ElementTree

from rich.console import Console
from rich.live import Live
from rich.text import Text

from checked_backend.findings import Verdict
from checked_backend.fuzz.corpus import Corpus, Totals
from checked_backend.fuzz.examine import CHECK_FAILED
from checked_backend.fuzz.results import Group
from checked_backend.fuzz.text import describe, describe_inputs, render_function
from checked_backend.report.clean import clean
from checked_backend.report.junit import junit_text, new_case, new_problem, xml_text
from checked_backend.runs.page import page_environment, view_of
from checked_backend.runs.progress import duration

MEANING: Mapping[str, str] = MappingProxyType(
    {
        "new": "wrong, and not known before",
        "known": "wrong, and known before",
        "documented": "a documented difference of compiled programs",
        "unconfirmed": "did not show again in a fresh process",
    }
)
"""How groups may stand, in the order in which they are counted, and what that means."""

_COLOURS = {"new": "fail", "known": "inconclusive", "documented": "quiet", "unconfirmed": "quiet"}
_DIFFERS = {"crash": "raises or crashes, eager does not", "structure": "returns other metadata than eager"}
_FENCES = re.compile(r"`+")
_SHOWN_IN_TEXT, _SHOWN_ON_PAGE = 5, 50
_EVERY = 60.0
"""Seconds between lines where there is no terminal."""


@dataclass(frozen=True, slots=True)
class Shown:
    """A group as it is shown."""

    group: Group
    standing: str

    @property
    def why(self) -> str:
        """Why it stands so, in words."""
        difference = self.group.difference
        return MEANING[self.standing] if difference is None else difference.reason

    @property
    def source(self) -> str:
        """The page that documents the difference; empty of what may be a bug."""
        return "" if self.group.difference is None else self.group.difference.source


@dataclass(frozen=True, slots=True)
class Summary:
    """A fuzz.

    Attributes:
        groups: The groups, those met most first.
        waiting: How many failures are not confirmed yet.
        gone: The failures that did not show again in a fresh process, each with what it was.
        undecided: The programs without a verdict, each with the reason.
        damaged: Files in its folder that are no records, and why.
    """

    settings: Mapping[str, str]
    totals: Totals
    groups: Sequence[Shown]
    waiting: int
    gone: Sequence[tuple[str, str]]
    undecided: Sequence[tuple[str, str]]
    damaged: Sequence[str] = ()

    @property
    def verdict(self) -> Verdict:
        """*Fail* if a group is new. *Inconclusive* if there are `doubts`."""
        if any(shown.standing == "new" for shown in self.groups):
            return Verdict.FAIL
        return Verdict.INCONCLUSIVE if self.doubts else Verdict.PASS

    @property
    def doubts(self) -> list[str]:
        """The reasons why the compiler cannot pass."""
        doubts = list(self.damaged)
        if not self.totals.checked:
            doubts.append("no program was checked")
        if self.waiting:
            doubts.append(f"{self.waiting} failures are not confirmed yet: run again with the same --out")
        gone = len(self.gone) + sum(shown.standing == "unconfirmed" for shown in self.groups)
        if gone:
            doubts.append(
                f"{gone} failures did not show again in a fresh process: the compiler may depend on what ran before"
            )
        failed = sum(reason.startswith(CHECK_FAILED) for _, reason in self.undecided)
        if failed:
            doubts.append(f"{failed} checks failed themselves: that is a bug in checked_backend; please report it")
        if self.totals.checked and 2 * self.totals.decided <= self.totals.checked:
            doubts.append(f"only {self.totals.decided} of {self.totals.checked} programs have a verdict")
        return doubts

    @property
    def title(self) -> str:
        """``FAIL: inductor on torch 2.13.0: groups: 1 new, 2 documented``."""
        counts = Counter(shown.standing for shown in self.groups)
        told = ", ".join(f"{counts[word]} {word}" for word in MEANING if counts[word]) or "none"
        compiler, torch = (self.settings.get(name, "?") for name in ("compiler", "torch"))
        return f"{self.verdict.value.upper()}: {compiler} on torch {torch}: groups: {told}"

    @property
    def counts(self) -> str:
        """``90 programs (2 fail, 88 pass), 80 of them compiled; 40 operations``."""
        statuses = ", ".join(f"{number} {status}" for status, number in sorted(self.totals.statuses.items()))
        return (
            f"{self.totals.checked} programs ({statuses}), {self.totals.compiled} of them compiled; "
            f"{self.totals.ops} operations"
        )


def summarize(corpus: Corpus, known: set[str]) -> Summary:
    """Summarize a corpus."""
    return Summary(
        corpus.settings,
        corpus.totals(),
        tuple(Shown(group, standing(group, known)) for group in corpus.groups()),
        len(corpus.failures()),
        tuple(corpus.unconfirmed()),
        tuple(corpus.inconclusive()),
        tuple(corpus.damaged),
    )


def standing(group: Group, known: set[str]) -> str:
    """``new``, ``known``, ``documented`` or ``unconfirmed``."""
    if group.difference is not None:
        return "documented"
    if not group.confirmed:
        return "unconfirmed"
    return "known" if group.signature in known else "new"


def render_text(summary: Summary) -> str:
    """The report as text."""
    lines = [_line(summary.title), _line(summary.counts), *summary.doubts]
    for number, shown in enumerate(summary.groups, 1):
        lines += ["", *_told(number, shown)]
    for programs, words in (
        (summary.gone, "failures that did not show again"),
        (summary.undecided, "programs without a verdict"),
    ):
        if programs:
            lines += ["", f"{len(programs)} {words}, for example:"]
            lines += [f"  {name}: {_line(reason)[:200]}" for name, reason in programs[:_SHOWN_IN_TEXT]]
    return "\n".join(lines)


def _line(text: str) -> str:
    """A stranger's text in one line: it forges no other."""
    return clean(text).replace("\n", " ")


def ways(shown: Shown) -> str:
    """How the program of a group is compiled: ``gradients and dynamic``; empty if it is neither."""
    return " and ".join(name for name in ("gradients", "dynamic") if getattr(shown.group.program, name))


def _told(number: int, shown: Shown) -> list[str]:
    group = shown.group
    met = f"met {group.met} time{'s' * (group.met != 1)}"
    lines = [f"{number}. {_line(group.signature)} ({shown.standing}: {shown.why}; {met})"]
    lines.append(f"   {_line(group.result.message)[:300]}")
    if shown.source:
        lines.append(f"   documented at {shown.source}")
    lines += [f"     {line}" for line in describe(group.program).splitlines()]
    if ways(shown):
        lines.append(f"   with {ways(shown)}")
    if group.script:
        shows = "fails in a fresh process" if group.script_shows else "does not show it by itself; the check does"
        lines.append(f"   the script {shows}: fuzz --repros DIR writes it")
    return lines


def render_issue(group: Group, settings: Mapping[str, str]) -> str:
    """The issue: what differs, the program, the script, versions and hardware."""
    compiler = settings.get("compiler", "?")
    what = _DIFFERS.get(group.kind, "gives other results than eager")
    parts = [
        "# " + _line(f"torch.compile(backend={compiler!r}): {group.op} {what}") + "\n",
        f"{_fenced(group.result.message, 'text')}\n",
        f"{_fenced(describe(group.program))}\n",
    ]
    if group.script:
        shown = "exits 1 while the bug is there" if group.script_shows else "shows it to the eye alone"
        parts.append(f"Script ({shown}):\n\n{_fenced(group.script.rstrip())}\n")
    versions = "\n".join(f"- {_line(name)}: {_line(value)}" for name, value in settings.items() if name != "choices")
    parts.append(f"Versions:\n\n{versions}\n")
    return "\n".join(parts)


def _fenced(code: str, language: str = "python") -> str:
    """A block of code, whose fence is longer than any in it."""
    longest = max((len(found) for found in _FENCES.findall(code)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{clean(code)}\n{fence}"


def render_json(summary: Summary) -> str:
    """The report as JSON."""
    raw = {
        "schema": "checked_backend.fuzz",
        "verdict": summary.verdict.value,
        "settings": dict(summary.settings),
        "programs": dict(summary.totals.statuses),
        "compiled": summary.totals.compiled,
        "operations": summary.totals.ops,
        "doubts": summary.doubts,
        "waiting": summary.waiting,
        "not_shown_again": len(summary.gone),
        "groups": [_as_data(shown) for shown in summary.groups],
    }
    return json.dumps(raw, indent=2, sort_keys=True)


def _as_data(shown: Shown) -> Mapping[str, Any]:
    group = shown.group
    return {
        "signature": group.signature,
        "standing": shown.standing,
        "why": shown.why,
        "documented_at": shown.source,
        **{name: getattr(group, name) for name in ("kind", "detail", "stage", "op", "met", "script", "script_shows")},
        "message": group.result.message,
        "status": group.result.status.value,
        "source": render_function(group.program),
        "inputs": describe_inputs(group.program),
        "program": json.loads(group.text),
    }


def render_junit(summary: Summary) -> str:
    """Return a fuzz as JUnit XML: a test case for the run, and one for each group.

    A new group is a ``failure``. Known, documented and unconfirmed groups are ``skipped``: they fail no run. The run is
    an ``error`` if there are doubts: no program was checked, failures wait to be confirmed.
    """
    suite = ElementTree.Element("testsuite", name="checked_backend fuzz")
    run = new_case(suite, "programs", "checked_backend.fuzz")
    text = "\n".join([summary.title, summary.counts, *summary.doubts])
    if summary.doubts:
        new_problem(run, "error", Verdict.INCONCLUSIVE.value, summary.doubts[0], text)
    else:
        ElementTree.SubElement(run, "system-out").text = xml_text(text)
    for shown in summary.groups:
        group, is_new = shown.group, shown.standing == "new"
        message = group.result.message if is_new else f"{shown.standing}: {shown.why} {shown.source}".strip()
        case = new_case(suite, group.signature, "checked_backend.fuzz.groups")
        issue = render_issue(group, summary.settings)
        new_problem(case, "failure" if is_new else "skipped", shown.standing, message, issue)
    return junit_text(suite)


def render_html(summary: Summary) -> str:
    """Return a fuzz as one HTML page: a table of groups, then each with program, findings, script and issue text.

    Nothing is loaded from elsewhere, nothing in it runs, and every text is escaped.
    """
    template = page_environment("checked_backend.fuzz", "checked_backend.report").get_template("fuzz.html.j2")
    return template.render(
        summary=summary,
        colours=_COLOURS,
        standings=[word for word in MEANING if any(shown.standing == word for shown in summary.groups)],
        meaning=MEANING,
        gone=summary.gone[:_SHOWN_ON_PAGE],
        undecided=summary.undecided[:_SHOWN_ON_PAGE],
        describe=describe,
        ways=ways,
        issue=render_issue,
        report_of=view_of,
    )


class Progress(Live):
    """Tells of new groups, and now and then how many programs, operations and groups there are."""

    def __init__(
        self, corpus: Corpus, console: Console, known: set[str], clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(console=console, refresh_per_second=2, transient=True)
        self._corpus = corpus
        self._known = known
        self._clock = clock
        self._begun = self._told = clock()
        self._before = corpus.totals().checked

    def found(self, group: Group) -> None:
        """Tell of a group that is new in this corpus."""
        word = standing(group, self._known)
        style = "bold red" if word == "new" else "dim"
        line = Text.assemble((f"{word:<11}", style), clean(f"{group.signature}: {group.result.message}"[:200]))
        self.console.print(line, soft_wrap=True, highlight=False)

    def tell(self) -> None:
        """Show the counts."""
        now = self._clock()
        if self.console.is_terminal:
            self.update(Text(self.line()))
        elif now - self._told > _EVERY:
            self._told = now
            self.console.print(self.line(), soft_wrap=True, highlight=False)

    def line(self) -> str:
        """The counts in one line."""
        totals, spent = self._corpus.totals(), self._clock() - self._begun
        rate = (totals.checked - self._before) / max(spent, 1e-9)
        share = totals.compiled / totals.checked if totals.checked else 0.0
        groups = self._corpus.groups()
        bugs = sum(group.confirmed and group.difference is None for group in groups)
        return (
            f"{duration(spent)}: {totals.checked} programs, {rate:.2f} a second, {share:.0%} compiled, "
            f"{totals.ops} operations, {bugs} groups"
        )
