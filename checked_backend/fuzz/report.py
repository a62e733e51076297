"""What a fuzz found, as the summary of a run whose cases are its groups; issues to paste; and how a run is going."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from rich.console import Console
from rich.live import Live
from rich.text import Text

from checked_backend.fuzz.build import function_source
from checked_backend.fuzz.corpus import Corpus
from checked_backend.fuzz.examine import CHECK_FAILED
from checked_backend.fuzz.results import Group
from checked_backend.fuzz.text import describe, describe_inputs
from checked_backend.report.clean import clean, fenced
from checked_backend.runs.case import Case, CaseResult, Status
from checked_backend.runs.progress import duration
from checked_backend.runs.results import Plan
from checked_backend.runs.summary import CaseSummary, Summary

PROGRAMS = "all programs"
"""The case that stands for the programs without a group."""

_DECIDED = (Status.PASS, Status.FAIL, Status.CRASH, Status.HANG)
_DIFFERS = {"crash": "raises or crashes, eager does not", "structure": "returns other metadata than eager"}
_DATA = ("kind", "detail", "stage", "op", "met", "script", "script_shows")
_EXAMPLES = 50
_EVERY = 60.0
"""Seconds between lines where there is no terminal."""


def summarize(corpus: Corpus, known: set[str]) -> Summary:
    """Summarize a corpus: each group is a case, and so are the programs without one.

    *Fail* if a group is new. *Inconclusive* if the compiler cannot pass.
    """
    settings, checked, groups = corpus.settings, corpus.checked, corpus.groups()
    counts = Counter(entry.result.status.value for entry in checked)
    statuses = ", ".join(f"{number} {status}" for status, number in sorted(counts.items()))
    compiler = settings.get("compiler", "?")
    title = (
        f"{compiler} on torch {settings.get('torch', '?')}, {len(checked)} programs ({statuses}), "
        f"{corpus.compiled} of them compiled, {corpus.ops} operations"
    )
    gone, undecided = corpus.unconfirmed(), corpus.inconclusive()
    unconfirmed = len(gone) + sum(standing(group, known) == "unconfirmed" for group in groups)
    doubts = list(_doubts(counts, len(corpus.failures()), unconfirmed, [reason for _, reason in undecided]))
    rest = CaseResult(Status.INCONCLUSIVE if doubts else Status.PASS, "; ".join(doubts))
    examples = [
        *(f"{name}: did not show again: {reason}" for name, reason in gone[:_EXAMPLES]),
        *(f"{name}: no verdict: {reason}" for name, reason in undecided[:_EXAMPLES]),
    ]
    example = "\n".join(_line(line) for line in examples)
    data = {"programs": dict(counts), "compiled": corpus.compiled, "operations": corpus.ops, "doubts": doubts}
    everything = Case("fuzz", PROGRAMS, "random", "any dtype", compiler=compiler)
    return Summary(
        title,
        Plan(dict(settings), ""),
        [
            *(_case_of(group, standing(group, known), settings) for group in groups),
            CaseSummary(everything, rest, example=example, data=data),
        ],
        damaged=corpus.damaged,
        kind="fuzz",
    )


def _doubts(counts: Counter[str], waiting: int, unconfirmed: int, undecided: list[str]) -> Iterator[str]:
    """The reasons why the compiler cannot pass."""
    checked, decided = counts.total(), sum(counts[status.value] for status in _DECIDED)
    if not checked:
        yield "no program was checked"
    if waiting:
        yield f"{waiting} failures are not confirmed yet: run again with the same --out"
    if unconfirmed:
        yield (
            f"{unconfirmed} failures did not show again in a fresh process: the compiler may depend on what ran before"
        )
    failed = sum(reason.startswith(CHECK_FAILED) for reason in undecided)
    if failed:
        yield f"{failed} checks failed themselves: that is a bug in checked_backend; please report it"
    if checked and 2 * decided <= checked:
        yield f"only {decided} of {checked} programs have a verdict"


def standing(group: Group, known: set[str]) -> str:
    """``new``, ``known``, ``documented`` or ``unconfirmed``."""
    if group.difference is not None:
        return "documented"
    if not group.confirmed:
        return "unconfirmed"
    return "known" if group.signature in known else "new"


def _case_of(group: Group, stands: str, settings: Mapping[str, str]) -> CaseSummary:
    """A group as a case. What is known or documented is expected."""
    program, difference = group.program, group.difference
    expected = "wrong, and known before" if stands == "known" else ""
    if difference is not None:
        expected = f"{difference.reason}: {difference.source}"
    status, why = Status.FAIL, ""
    if stands == "unconfirmed":
        status, why = Status.INCONCLUSIVE, "did not show again in a fresh process: "
    dtype = program.inputs[0].dtype if program.inputs else ""
    mode = "training" if program.gradients else "inference"
    met = f"# met {group.met} time{'s' * (group.met != 1)}"
    shows = "fails in a fresh process" if group.script_shows else "does not show it by itself; the check does"
    texts = {f"Script: it {shows}": group.script} if group.script else {}
    if difference is None:
        texts["Text for an issue"] = render_issue(group, settings)
    return CaseSummary(
        Case("fuzz", group.signature, mode, dtype, compiler=settings.get("compiler", "?"), dynamic=program.dynamic),
        CaseResult(
            status,
            why + group.result.message,
            group.stage,
            expected,
            group.result.seconds,
            report=group.result.report,
        ),
        example=f"{met}\n{describe(program)}" + (f"\n# the script {shows}: fuzz --repros DIR" if group.script else ""),
        texts=texts,
        data={
            "standing": stands,
            **{name: getattr(group, name) for name in _DATA},
            "source": function_source(program),
            "inputs": describe_inputs(program),
            "program": json.loads(group.text),
        },
    )


def _line(text: str) -> str:
    """A stranger's text in one line: it forges no other."""
    return clean(text).replace("\n", " ")


def render_issue(group: Group, settings: Mapping[str, str]) -> str:
    """The issue: what differs, the program, the script, versions and hardware."""
    compiler = settings.get("compiler", "?")
    what = _DIFFERS.get(group.kind, "gives other results than eager")
    parts = [
        "# " + _line(f"torch.compile(backend={compiler!r}): {group.op} {what}") + "\n",
        f"{fenced(clean(group.result.message), 'text')}\n",
        f"{fenced(clean(describe(group.program)), 'python')}\n",
    ]
    if group.script:
        shown = "exits 1 while the bug is there" if group.script_shows else "shows it to the eye alone"
        parts.append(f"Script ({shown}):\n\n{fenced(clean(group.script.rstrip()), 'python')}\n")
    versions = "\n".join(f"- {_line(name)}: {_line(value)}" for name, value in settings.items() if name != "choices")
    parts.append(f"Versions:\n\n{versions}\n")
    return "\n".join(parts)


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
        self._before = len(corpus.checked)

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
        corpus, checked, spent = self._corpus, len(self._corpus.checked), self._clock() - self._begun
        rate = (checked - self._before) / max(spent, 1e-9)
        share = corpus.compiled / checked if checked else 0.0
        bugs = sum(group.confirmed and group.difference is None for group in corpus.groups())
        return (
            f"{duration(spent)}: {checked} programs, {rate:.2f} a second, {share:.0%} compiled, "
            f"{corpus.ops} operations, {bugs} groups"
        )
