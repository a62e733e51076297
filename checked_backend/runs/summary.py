"""Summarize the cases of a run, and compare two runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from checked_backend.findings import Verdict
from checked_backend.runs.case import Attempt, Case, CaseResult, Status
from checked_backend.runs.results import Plan, Results, WantedCase

NOISIER = 2.0
"""The least factor of greater noise that is reported."""

_WORST = (
    Status.FAIL,
    Status.CRASH,
    Status.HANG,
    Status.OUT_OF_MEMORY,
    Status.LOST,
    Status.ERROR,
    Status.IMPORT_ERROR,
    Status.INCONCLUSIVE,
    Status.UNSUPPORTED,
    Status.PASS,
    Status.SKIPPED,
)
_OF_THE_PLACE = frozenset({Status.IMPORT_ERROR, Status.UNSUPPORTED, Status.LOST})
"""Statuses that depend on the machine, so that another attempt may end differently without a flaky model."""


@dataclass(frozen=True, slots=True)
class CaseSummary:
    """A case of a run.

    Attributes:
        result: The worst result of the attempts that count.
        attempts: All attempts of its state, in order.
        finished: When the last of them ended; of a case that is not run, when it was asked for.
        example: What shows it, as text.
        texts: More texts, by their headings.
        data: What JSON has of it besides.
    """

    case: Case
    result: CaseResult
    attempts: Sequence[Attempt] = ()
    finished: str = ""
    example: str = ""
    texts: Mapping[str, str] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)

    @property
    def flaky(self) -> bool:
        """Whether attempts under the same versions ended differently, for reasons other than the machine."""
        return len({attempt.result.status for attempt in self.attempts} - _OF_THE_PLACE) > 1

    @property
    def status(self) -> Status:
        """The status of the result."""
        return self.result.status

    @property
    def row(self) -> Mapping[str, Any]:
        """The values that every rendering shows, by name."""
        case, result = self.case, self.result
        return {
            "suite": case.suite,
            "model": case.model,
            "mode": case.mode,
            "dtype": case.dtype,
            "device": case.device,
            "compiler": case.compiler,
            "dynamic": case.dynamic,
            "status": self.status.value,
            "flaky": self.flaky,
            "attempts": len(self.attempts) or 1,
            "message": result.message,
            "expected": result.expected,
            "seconds": result.seconds,
            "process_peak": result.peak,
            "noise": result.noise,
            "host": result.host,
            "finished": self.finished,
        }


@dataclass(frozen=True, slots=True)
class Summary:
    """The cases of a run.

    Attributes:
        title: The run for people.
        cases: Its cases, sorted by suite, model and way.
        waiting: The cases that were asked for and have no result, as they are now.
        damaged: Files in its folder that are no results, and why.
    """

    title: str
    plan: Plan
    cases: Sequence[CaseSummary]
    waiting: Sequence[Case] = ()
    damaged: Sequence[str] = ()
    kind: str = "sweep"

    @property
    def counts(self) -> Mapping[Status, int]:
        """The number of cases by status."""
        counted = Counter(case.status for case in self.cases)
        return {status: counted[status] for status in Status if counted[status]}

    @property
    def counted(self) -> Mapping[Status, str]:
        """The same in words: ``3 fail (1 expected)``."""
        expected = Counter(case.status for case in self.cases if case.result.expected)
        some = {status: f" ({count} expected)" for status, count in expected.items()}
        return {status: f"{count} {status}{some.get(status, '')}" for status, count in self.counts.items()}

    @property
    def verdict(self) -> Verdict:
        """The worst verdict that counts; inconclusive if nothing was checked, or something was not."""
        unknown = [Verdict.INCONCLUSIVE] * bool(self.waiting or self.damaged)
        return Verdict.worst([*(case.result.verdict for case in self.cases), *unknown]) or Verdict.INCONCLUSIVE


def summarize(results: Results, only: Sequence[Case] | None = None) -> Summary:
    """Summarize each case of a run, or only these.

    If a case's source, compiler or rules have changed, only results of the state count that was asked for last.
    """
    wanted = results.wanted.values() if only is None else [results.wanted[case] for case in only]
    cases, waiting = [], []
    for one in wanted:
        case = _summary(one, results)
        if case is None:
            waiting.append(one.case)
        else:
            cases.append(case)
    return Summary(
        results.title,
        results.plan,
        sorted(cases, key=lambda case: case.case.key.lower()),
        sorted(waiting, key=lambda case: case.key.lower()),
        results.damaged if only is None else (),
    )


def _summary(wanted: WantedCase, results: Results) -> CaseSummary | None:
    if wanted.skip is not None:
        return CaseSummary(wanted.case, CaseResult(Status.SKIPPED, wanted.skip), (), wanted.asked)
    attempts = results.attempts(wanted)
    counting = results.done(wanted) or attempts
    if not counting:
        return None
    worst = min(counting, key=lambda attempt: _WORST.index(attempt.result.status))
    return CaseSummary(wanted.case, worst.result, attempts, attempts[-1].finished)


@dataclass(frozen=True, slots=True)
class CaseChange:
    """A change of a case between two runs.

    Attributes:
        factor: The noise in the later run divided by that in the earlier one, if that is what changed.
    """

    before: CaseSummary
    after: CaseSummary
    factor: float | None = None

    @property
    def words(self) -> str:
        """The change, in words."""
        if self.factor is not None:
            return f"{self.factor:.2g} times"
        if self.before.status is not self.after.status:
            return f"{self.before.status} -> {self.after.status}"
        if self.after.status.failed:
            known = " (known)" if self.before.result.expected else ""
            return f"{_kind(self.before.result)}{known} -> {_kind(self.after.result)}"
        return f"equal bits -> noise of {self.after.result.noise:.2g}"


@dataclass(frozen=True, slots=True)
class Comparison:
    """The differences between two runs.

    Attributes:
        changes: The changed cases by heading, the worst heading first, without empty ones: newly failing now; fixed;
            of another status otherwise; noisier, also where the results were equal bit for bit.
        new: Cases of the later run only.
        gone: Cases of the earlier run only.
    """

    before: Summary
    changes: Mapping[str, Sequence[CaseChange]]
    new: Sequence[CaseSummary]
    gone: Sequence[CaseSummary]


def compare(before: Summary, after: Summary) -> Comparison:
    """Compare two runs."""
    old = {case.case: case for case in before.cases}
    now = {case.case: case for case in after.cases}
    changes: dict[str, list[CaseChange]] = {"newly failing": [], "fixed": [], "other changes": []}
    same: list[CaseChange] = []
    for key in now:
        if key in old:
            change = CaseChange(old[key], now[key])
            changes.get(_heading(change.before, change.after), same).append(change)
    changes["noisier"] = _noisier(same)
    return Comparison(
        before,
        {heading: found for heading, found in changes.items() if found},
        [now[key] for key in now if key not in old],
        [old[key] for key in old if key not in now],
    )


def _heading(before: CaseSummary, after: CaseSummary) -> str:
    """The heading of a case; empty if it ended alike."""
    old, now = before.result, after.result
    if old.status is now.status and _fails(old) == _fails(now) and _kind(old) == _kind(now):
        return ""
    if _fails(now) and not _fails(old):
        return "newly failing"
    return "fixed" if old.status.failed and now.status is Status.PASS else "other changes"


def _fails(result: CaseResult) -> bool:
    """Whether a result fails, and no rule expects it."""
    return result.status.failed and not result.expected


def _kind(result: CaseResult) -> str:
    """The kind of a failure, of which its message begins; else the status."""
    return result.message.partition(":")[0] if result.status is Status.FAIL else str(result.status)


def _noisier(changes: Sequence[CaseChange]) -> list[CaseChange]:
    """Cases with greater noise, then those that passed with all bits equal, without noise to measure, and have some."""
    more, some = [], []
    for change in changes:
        before, after = change.before.result, change.after.result
        if before.noise and after.noise and after.noise >= NOISIER * before.noise:
            more.append(replace(change, factor=after.noise / before.noise))
        elif after.status is Status.PASS and before.report and before.noise is None and after.noise:
            some.append(change)
    more.sort(key=lambda change: -(change.factor or 0.0))
    return more + sorted(some, key=lambda change: -(change.after.result.noise or 0.0))
