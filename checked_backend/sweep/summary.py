"""What is known of each case of a run, and what changed between two runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from checked_backend.errors import SuiteError
from checked_backend.findings import Verdict
from checked_backend.sweep.case import Case, Outcome
from checked_backend.sweep.database import Database, Result, Run
from checked_backend.sweep.status import Status

__all__ = ["CaseSummary", "Change", "Comparison", "Summary", "compare", "find_run", "summarize"]

NOISIER = 2.0
"""How many times greater the noise must be to be told."""

SLOWER = 1.5
"""How many times longer a compiled step, or compiling, must take to be told: machines are busy at times."""

LEAST_SECONDS = 1e-3
"""By how much longer at least: a step of microseconds is told by none."""

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
"""What another attempt ends otherwise for, because somebody has mended the place where it runs."""


@dataclass(frozen=True, slots=True)
class CaseSummary:
    """A case of a run.

    Attributes:
        case: It.
        outcome: The answer: the worst of the attempts that count.
        attempts: All, the first one first.
    """

    case: Case
    outcome: Outcome
    attempts: Sequence[Result]

    @property
    def flaky(self) -> bool:
        """Whether attempts under the same versions ended in different ways that are the model's own."""
        return len({result.outcome.status for result in self.attempts} - _OF_THE_PLACE) > 1

    @property
    def status(self) -> Status:
        """The answer."""
        return self.outcome.status


@dataclass(frozen=True, slots=True)
class Summary:
    """A run.

    Attributes:
        run: It.
        cases: By suite, model and way.
    """

    run: Run
    cases: Sequence[CaseSummary]

    @property
    def counts(self) -> Mapping[Status, int]:
        """How many cases ended in each way."""
        counted = Counter(case.status for case in self.cases)
        return {status: counted[status] for status in Status if counted[status]}

    @property
    def verdict(self) -> Verdict:
        """The worst one that counts; of nothing checked it is inconclusive."""
        verdicts = {case.outcome.verdict for case in self.cases}
        order = (Verdict.FAIL, Verdict.INCONCLUSIVE, Verdict.PASS)
        return next((verdict for verdict in order if verdict in verdicts), Verdict.INCONCLUSIVE)


@dataclass(frozen=True, slots=True)
class Change:
    """A case that two runs have.

    Attributes:
        before: In the earlier run.
        after: In the later one.
        factor: How many times more, where it is about a number.
    """

    before: CaseSummary
    after: CaseSummary
    factor: float | None = None

    @property
    def words(self) -> str:
        """What changed."""
        if self.factor is not None:
            return f"{self.factor:.2g} times"
        return f"{self.before.status} -> {self.after.status}"


@dataclass(frozen=True, slots=True)
class Comparison:
    """What changed from one run to another.

    Attributes:
        before: The earlier.
        after: The later.
        newly_failing: Failed now, and did not.
        fixed: Passes now, and failed.
        changed: Ended in another way that is neither.
        noisier: The same answer, with greater noise.
        slower: The same answer, with slower compiled steps.
        faster: The same answer, with faster compiled steps.
        slower_to_compile: The same answer, with longer compile time.
        new: Only in the later.
        gone: Only in the earlier.
    """

    before: Run
    after: Run
    newly_failing: Sequence[Change]
    fixed: Sequence[Change]
    changed: Sequence[Change]
    noisier: Sequence[Change]
    slower: Sequence[Change]
    faster: Sequence[Change]
    slower_to_compile: Sequence[Change]
    new: Sequence[CaseSummary]
    gone: Sequence[CaseSummary]


def summarize(database: Database, run: Run) -> Summary:
    """What is known of each case of a run.

    Of a case that would now be run otherwise (another source, another rule), only the last state counts. Attempts that
    were asked for with ``--rerun`` replace those before them.
    """
    reruns = database.reruns(run)
    by_case: dict[str, list[Result]] = {}
    for result in database.results(run):
        by_case.setdefault(result.case.key, []).append(result)
    cases = [_summary(results, reruns) for results in by_case.values()]
    return Summary(run, sorted(cases, key=lambda c: c.case.key.lower()))


def _summary(results: Sequence[Result], reruns: Mapping[tuple[str, str], set[int]]) -> CaseSummary:
    last = results[-1]
    attempts = sorted((r for r in results if r.state == last.state), key=lambda r: r.attempt)
    asked = reruns.get((last.case.key, last.state), set())
    first = max((r.attempt for r in attempts if r.attempt in asked), default=0)
    counting = [r for r in attempts if r.attempt >= first]
    worst = min(counting, key=lambda r: _WORST.index(r.outcome.status))
    return CaseSummary(last.case, worst.outcome, attempts)


def find_run(runs: Sequence[Run], word: str) -> Run:
    """A run by number, name, or torch version; the last of several.

    Raises:
        SuiteError: There is none.
    """
    for run in reversed(runs):
        if word in (str(run.number), run.name) or (run.versions.get("torch", "").split("+")[0] == word.split("+")[0]):
            return run
    have = "; ".join(run.title for run in runs) or "none"
    raise SuiteError(f"no run {word!r}; give a number, a name or a torch version. There are: {have}")


def compare(before: Summary, after: Summary) -> Comparison:
    """What changed between two runs."""
    old = {case.case.key: case for case in before.cases}
    now = {case.case.key: case for case in after.cases}
    both = [Change(old[key], now[key]) for key in now if key in old]
    same = [change for change in both if change.before.status is change.after.status]
    other = [change for change in both if change.before.status is not change.after.status]
    failing = [change for change in other if change.after.status.failed and not change.before.status.failed]
    fixed = [change for change in other if change.before.status.failed and change.after.status is Status.PASS]
    rest = [change for change in other if change not in failing and change not in fixed]
    return Comparison(
        before.run,
        after.run,
        newly_failing=failing,
        fixed=fixed,
        changed=rest,
        noisier=_grown(same, lambda outcome: outcome.noise, NOISIER, 0.0),
        slower=_grown(same, _compiled_step, SLOWER, LEAST_SECONDS),
        faster=[
            _turned(change) for change in _grown([_turned(c) for c in same], _compiled_step, SLOWER, LEAST_SECONDS)
        ],
        slower_to_compile=_grown(same, lambda outcome: outcome.speed.compile_seconds, SLOWER, 1.0),
        new=[now[key] for key in now if key not in old],
        gone=[old[key] for key in old if key not in now],
    )


def _compiled_step(outcome: Outcome) -> float | None:
    return outcome.speed.compiled_step


def _turned(change: Change) -> Change:
    return Change(change.after, change.before, change.factor)


def _grown(
    changes: Sequence[Change], number: Callable[[Outcome], float | None], factor: float, least: float
) -> list[Change]:
    found = []
    for change in changes:
        before, after = number(change.before.outcome), number(change.after.outcome)
        if before and after and after >= factor * before and after - before >= least:
            found.append(Change(change.before, change.after, after / before))
    return sorted(found, key=lambda change: -(change.factor or 0.0))
