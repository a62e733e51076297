"""Summarize the cases of a run, and compare two runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

from checked_backend.errors import SuiteError
from checked_backend.findings import Verdict
from checked_backend.sweep.case import Case, CaseResult
from checked_backend.sweep.database import Attempt, Database, Run
from checked_backend.sweep.status import Status

__all__ = ["CaseChange", "CaseSummary", "Summary", "SweepComparison", "compare", "find_run", "summarize"]

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


_OF_THE_PLACE = frozenset({Status.IMPORT_ERROR, Status.UNSUPPORTED, Status.LOST, Status.SKIPPED})
"""Statuses that depend on the machine, so that another attempt may end differently without a flaky model."""


@dataclass(frozen=True, slots=True)
class CaseSummary:
    """A case of a run.

    Attributes:
        case: The case.
        outcome: The worst outcome of the attempts that count.
        attempts: All attempts that count, in order.
    """

    case: Case
    outcome: CaseResult
    attempts: Sequence[Attempt]

    @property
    def flaky(self) -> bool:
        """Whether attempts under the same versions ended differently, for reasons other than the machine."""
        return len({result.outcome.status for result in self.attempts} - _OF_THE_PLACE) > 1

    @property
    def status(self) -> Status:
        """The status of the outcome."""
        return self.outcome.status


@dataclass(frozen=True, slots=True)
class Summary:
    """The cases of a run.

    Attributes:
        run: The run.
        cases: Its cases, sorted by suite, model and way.
        waiting: The cases that were asked for and have no result, as they are now.
    """

    run: Run
    cases: Sequence[CaseSummary]
    waiting: Sequence[Case] = ()

    def of(self, keys: Container[str]) -> Summary:
        """The same for some cases only."""
        cases = [case for case in self.cases if case.case.key in keys]
        return Summary(self.run, cases, [case for case in self.waiting if case.key in keys])

    @property
    def counts(self) -> Mapping[Status, int]:
        """The number of cases by status."""
        counted = Counter(case.status for case in self.cases)
        return {status: counted[status] for status in Status if counted[status]}

    @property
    def verdict(self) -> Verdict:
        """The worst verdict that counts; inconclusive if nothing was checked, or something was not."""
        verdicts = [case.outcome.verdict for case in self.cases]
        return Verdict.worst([*verdicts, *[Verdict.INCONCLUSIVE] * bool(self.waiting)]) or Verdict.INCONCLUSIVE


@dataclass(frozen=True, slots=True)
class CaseChange:
    """A change of a case between two runs.

    Attributes:
        before: The case in the earlier run.
        after: The case in the later run.
        factor: The number in the later run divided by that in the earlier one, if a number changed.
    """

    before: CaseSummary
    after: CaseSummary
    factor: float | None = None

    @property
    def words(self) -> str:
        """The change, in words."""
        if self.factor is not None:
            return f"{self.factor:.2g} times"
        kinds = _kind(self.before.outcome), _kind(self.after.outcome)
        if self.before.status is self.after.status and self.after.status.failed:
            known = " (known)" if self.before.outcome.expected else ""
            return f"{kinds[0]}{known} -> {kinds[1]}"
        if self.before.status is self.after.status:
            return f"equal bits -> noise of {self.after.outcome.noise:.2g}"
        return f"{self.before.status} -> {self.after.status}"


@dataclass(frozen=True, slots=True)
class SweepComparison:
    """The differences between two runs.

    Attributes:
        before: The earlier run.
        after: The later run.
        newly_failing: Cases that fail now and did not before.
        fixed: Cases that pass now and failed before.
        changed: Cases whose status changed otherwise.
        noisier: Cases with the same status and greater noise, also those whose results were equal bit for bit.
        new: Cases of the later run only.
        gone: Cases of the earlier run only.
    """

    before: Run
    after: Run
    newly_failing: Sequence[CaseChange]
    fixed: Sequence[CaseChange]
    changed: Sequence[CaseChange]
    noisier: Sequence[CaseChange]
    new: Sequence[CaseSummary]
    gone: Sequence[CaseSummary]


def summarize(database: Database, run: Run) -> Summary:
    """Summarize each case of a run.

    If a case's source, compiler or rules have changed, only results of the state count that was asked for last.
    Attempts that ``--rerun`` requested replace earlier ones.
    """
    reruns, asked = database.reruns(run), database.asked(run)
    by_case: dict[str, list[Attempt]] = {}
    for result in sorted(database.results(run), key=lambda one: one.finished):
        wanted = asked.get(result.case.key)
        if wanted is None or result.state == wanted.state:
            by_case.setdefault(result.case.key, []).append(result)
    cases = [_summary(results, reruns) for results in by_case.values()]
    waiting = [one.case for key, one in asked.items() if key not in by_case]
    return Summary(run, sorted(cases, key=lambda c: c.case.key.lower()), sorted(waiting, key=lambda c: c.key.lower()))


def _summary(results: Sequence[Attempt], reruns: Mapping[tuple[str, str], set[int]]) -> CaseSummary:
    last = results[-1]
    attempts = sorted((r for r in results if r.state == last.state), key=lambda r: r.attempt)
    asked = reruns.get((last.case.key, last.state), set())
    first = max((r.attempt for r in attempts if r.attempt in asked), default=0)
    counting = [r for r in attempts if r.attempt >= first]
    worst = min(counting, key=lambda r: _WORST.index(r.outcome.status))
    return CaseSummary(last.case, worst.outcome, attempts)


def find_run(runs: Sequence[Run], word: str) -> Run:
    """Find a run by number, name, or torch version. If several match, the last one is returned.

    Raises:
        SuiteError: No run matches.
    """
    for run in reversed(runs):
        if word in (str(run.number), run.name) or (run.versions.get("torch", "").split("+")[0] == word.split("+")[0]):
            return run
    have = "; ".join(run.title for run in runs) or "none"
    raise SuiteError(f"no run {word!r}; give a number, a name or a torch version. There are: {have}")


def compare(before: Summary, after: Summary) -> SweepComparison:
    """Compare two runs."""
    old = {case.case.key: case for case in before.cases}
    now = {case.case.key: case for case in after.cases}
    both = [CaseChange(old[key], now[key]) for key in now if key in old]
    same = [change for change in both if _alike(change.before.outcome, change.after.outcome)]
    other = [change for change in both if not _alike(change.before.outcome, change.after.outcome)]
    failing = [change for change in other if _fails(change.after.outcome) and not _fails(change.before.outcome)]
    fixed = [change for change in other if change.before.status.failed and change.after.status is Status.PASS]
    rest = [change for change in other if change not in failing and change not in fixed]
    return SweepComparison(
        before.run,
        after.run,
        newly_failing=failing,
        fixed=fixed,
        changed=rest,
        noisier=[*_noisier(same), *_no_longer_equal(same)],
        new=[now[key] for key in now if key not in old],
        gone=[old[key] for key in old if key not in now],
    )


def _fails(outcome: CaseResult) -> bool:
    """Whether an outcome fails, and no rule expects it."""
    return outcome.status.failed and not outcome.expected


def _kind(outcome: CaseResult) -> str:
    """The kind of a failure, of which its message begins; else the status."""
    return outcome.message.partition(":")[0] if outcome.status is Status.FAIL else str(outcome.status)


def _alike(before: CaseResult, after: CaseResult) -> bool:
    return before.status is after.status and _fails(before) == _fails(after) and _kind(before) == _kind(after)


def _no_longer_equal(changes: Sequence[CaseChange]) -> list[CaseChange]:
    """Cases that pass in both runs, in the earlier one without any noise to measure: all bits were equal."""
    found = [
        change
        for change in changes
        if change.after.status is Status.PASS
        and change.before.outcome.report
        and change.before.outcome.noise is None
        and change.after.outcome.noise
    ]
    return sorted(found, key=lambda change: -(change.after.outcome.noise or 0.0))


def _noisier(changes: Sequence[CaseChange]) -> list[CaseChange]:
    found = []
    for change in changes:
        before, after = change.before.outcome.noise, change.after.outcome.noise
        if before and after and after >= NOISIER * before:
            found.append(CaseChange(change.before, change.after, after / before))
    return sorted(found, key=lambda change: -(change.factor or 0.0))
