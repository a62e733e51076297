"""A run: the cases that it is of, and the results that it has so far, in a folder."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path

from pydantic import ConfigDict, TypeAdapter

from checked_backend.errors import SuiteError
from checked_backend.runs.case import Attempt, Case, CaseResult, Status, encode
from checked_backend.runs.folder import StoredRun, case_name


@dataclass(frozen=True, slots=True)
class WantedCase:
    """A case as it was asked for last.

    Attributes:
        state: As of `Attempt`. Results of another state do not count.
        asked: When it was asked for, in UTC.
        since: Results that ended before this moment do not count once there is a later one: it runs again.
        skip: The reason why it is not run; None if it is.
    """

    __pydantic_config__ = ConfigDict(strict=True)

    case: Case
    state: str
    asked: str = ""
    since: str = ""
    skip: str | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run is of.

    Attributes:
        versions: Versions of the libraries that results depend on.
        started: When it started, in UTC.
    """

    __pydantic_config__ = ConfigDict(strict=True)

    versions: dict[str, str]
    started: str
    cases: list[WantedCase] = field(default_factory=list)


_PLAN, _ATTEMPT = TypeAdapter(Plan), TypeAdapter(Attempt)


class Results(StoredRun[Plan, Attempt]):
    """A sweep in its folder, opened as `RunFolder` is.

    Attributes:
        wanted: Its cases, as they were asked for last.
    """

    def __init__(self, path: Path, *, write: bool = False) -> None:
        super().__init__(path, "sweep", _PLAN, _ATTEMPT, write=write)
        self.plan = self._stored or Plan({}, _now())
        self._attempts: dict[Case, list[Attempt]] = defaultdict(list)
        for attempt in self._records:
            self._attempts[attempt.case].append(attempt)
        self.wanted = {wanted.case: wanted for wanted in self.plan.cases}
        for case in self._attempts.keys() - self.wanted.keys():  # copied from another folder
            last = max(self._attempts[case], key=lambda attempt: attempt.finished)
            self.wanted[case] = WantedCase(case, last.state)

    @property
    def title(self) -> str:
        """The run for people."""
        return f"{self.path} (torch {self.plan.versions.get('torch', '?')}, {self.plan.started[:10]})"

    def begin(self, versions: dict[str, str]) -> None:
        """Go on under these versions of libraries.

        Raises:
            SuiteError: It was begun under others, so that its results say nothing of these.
        """
        before = self.plan.versions
        if self.plan.cases and before != versions:
            names = sorted(name for name in {*before, *versions} if before.get(name) != versions.get(name))
            changes = ", ".join(f"{name} {before.get(name, 'none')} -> {versions.get(name, 'none')}" for name in names)
            raise SuiteError(
                f"{self.path}: was begun with other versions ({changes}); give another --out, "
                f"and compare the two with: checked-backend report NEW --since {self.path}"
            )
        self.plan = replace(self.plan, versions=versions)

    def ask(self, cases: Iterable[WantedCase], rerun: Container[str] = (), among: Container[Case] = ()) -> None:
        """Note the cases of a run, whether they run now or not.

        Args:
            rerun: Statuses of last attempts that ask for another one. If an earlier rerun did not get to all of its
                cases, it goes on, and no other cases are added.
            among: The cases that may be run again.
        """
        now = _now()
        for wanted in cases:
            before = self.wanted.get(wanted.case)
            since = before.since if before is not None and before.state == wanted.state else ""
            self.wanted[wanted.case] = replace(wanted, asked=now, since=since)
        runnable = [wanted for wanted in self.wanted.values() if wanted.case in among and wanted.skip is None]
        if not any(wanted.since and not self.done(wanted) for wanted in runnable):
            for wanted in runnable:
                done = self.done(wanted)
                if done and done[-1].result.status.value in rerun:
                    self.wanted[wanted.case] = replace(wanted, since=now)
        self._keep_plan()

    def add(self, case: Case, result: CaseResult) -> None:
        """Keep the result of a case that was asked for."""
        attempt = Attempt(case, self.wanted[case].state, _now(), result)
        self._folder.add(case_name(case.model, f"{case.key} {attempt.state}"), encode(attempt))
        self._attempts[case].append(attempt)

    def attempts(self, wanted: WantedCase) -> list[Attempt]:
        """All results of a case that are of its state, the oldest first."""
        found = [attempt for attempt in self._attempts.get(wanted.case, ()) if attempt.state == wanted.state]
        return sorted(found, key=lambda attempt: attempt.finished)

    def done(self, wanted: WantedCase) -> list[Attempt]:
        """The results of a case that count. One whose machine was lost runs again."""
        return [
            attempt
            for attempt in self.attempts(wanted)
            if attempt.finished >= wanted.since and attempt.result.status is not Status.LOST
        ]

    def merge(self, other: Results) -> int:
        """Copy what another run has and this one lacks. A second merge changes nothing. Returns how many are new."""
        self.begin(other.plan.versions)
        for case, wanted in other.wanted.items():
            if case not in self.wanted or self.wanted[case].asked < wanted.asked:
                self.wanted[case] = wanted
        self._keep_plan()
        return self._folder.merge(other._folder)

    def _keep_plan(self) -> None:
        self.plan = replace(self.plan, cases=list(self.wanted.values()))
        self._folder.write_plan(encode(self.plan))


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="microseconds")
