"""The results of sweeps in one SQLite file, committed case by case.

The file is not trusted, because a stranger may have written it: only tables are read, and every field is checked.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from checked_backend.errors import SuiteError
from checked_backend.sweep.case import Case, CaseResult, decoded
from checked_backend.sweep.file import Format, SqliteFile
from checked_backend.sweep.job import Job
from checked_backend.sweep.status import Status

__all__ = ["Asked", "Attempt", "Database", "Run"]

_MOST_ROWS = 10**9

_SCHEMA = """
CREATE TABLE run (
    id INTEGER PRIMARY KEY, name TEXT NOT NULL, versions TEXT NOT NULL, started TEXT NOT NULL, UNIQUE (name, versions));
CREATE TABLE result (
    id INTEGER PRIMARY KEY, run INTEGER NOT NULL REFERENCES run, key TEXT NOT NULL, state TEXT NOT NULL,
    attempt INTEGER NOT NULL, finished TEXT NOT NULL, status TEXT NOT NULL, "case" TEXT NOT NULL,
    outcome TEXT NOT NULL, UNIQUE (run, key, state, attempt));
CREATE TABLE again (
    run INTEGER NOT NULL REFERENCES run, key TEXT NOT NULL, state TEXT NOT NULL, attempt INTEGER NOT NULL,
    UNIQUE (run, key, state, attempt));
CREATE TABLE asked (
    run INTEGER NOT NULL REFERENCES run, key TEXT NOT NULL, state TEXT NOT NULL, moment TEXT NOT NULL,
    "case" TEXT NOT NULL, UNIQUE (run, key));
"""
_FORMAT = Format(
    0x43425357,  # "CBSW"
    2,
    _SCHEMA,
    frozenset({"run", "result", "again", "asked"}),
    "sweeps",
    "sweep",
    SuiteError,
)


@dataclass(frozen=True, slots=True)
class Run:
    """A run: results under one set of library versions.

    Attributes:
        number: The run's number in this file.
        name: The user's name for the run; may be empty.
        versions: Versions of the libraries that results depend on.
        started: When the run started.
    """

    number: int
    name: str
    versions: Mapping[str, str]
    started: str

    @property
    def title(self) -> str:
        """The run's name for people."""
        torch = self.versions.get("torch", "?")
        return f"run {self.number}{f' {self.name!r}' if self.name else ''} (torch {torch}, {self.started[:10]})"


@dataclass(frozen=True, slots=True)
class Attempt:
    """The outcome of one attempt at a case.

    Attributes:
        case: The case.
        attempt: The number of the attempt, from 0.
        finished: When the attempt ended.
        state: A digest that changes when the settings or the suite's source change (`Settings.digest`).
        outcome: Its outcome.
    """

    case: Case
    attempt: int
    finished: str
    state: str
    outcome: CaseResult


@dataclass(frozen=True, slots=True)
class Asked:
    """The case as it was asked for last.

    Attributes:
        case: The case.
        state: As of `Attempt`.
        moment: When it was asked for.
    """

    case: Case
    state: str
    moment: str


class Database(SqliteFile):
    """A file of results.

    Args:
        write: Create the file if it is missing, and lock it against other sweeps.

    Raises:
        SuiteError: The file is no database of sweeps, or another sweep has locked it.
    """

    def __init__(self, path: Path, *, write: bool = False) -> None:
        super().__init__(path, _FORMAT, write=write)

    def begin(self, name: str, versions: Mapping[str, str]) -> Run:
        """Return the run of these versions and this name. A new one is made if there is none."""
        text = json.dumps(dict(versions), sort_keys=True)
        with self._writing():
            self._connection.execute(
                "INSERT OR IGNORE INTO run (name, versions, started) VALUES (?, ?, ?)", (name, text, _now())
            )
        return next(run for run in self.runs() if run.name == name and dict(run.versions) == dict(versions))

    def runs(self) -> list[Run]:
        """All runs, the oldest first."""
        rows = self._query("SELECT id, name, versions, started FROM run ORDER BY id", ())
        return [
            Run(self._whole(number), str(name), self._versions(text), str(begun)) for number, name, text, begun in rows
        ]

    def _versions(self, text: object) -> Mapping[str, str]:
        raw = self._json(text, "versions")
        if not isinstance(raw, dict):
            raise SuiteError(f"{self.path}: versions: expected an object")
        return {str(name): str(value) for name, value in raw.items()}

    def add(self, run: Run, result: Attempt) -> None:
        """Write a result and commit it. One of the same attempt stays, unless a rule or a lost machine made it."""
        outcome = asdict(result.outcome)
        case = asdict(result.case)
        taken = "REPLACE" if result.outcome.status is Status.SKIPPED else "IGNORE"
        place = (run.number, result.case.key, result.state, result.attempt, Status.LOST.value)
        with self._writing():
            self._connection.execute(
                "DELETE FROM result WHERE run = ? AND key = ? AND state = ? AND attempt = ? AND status = ?", place
            )
            self._connection.execute(
                f'INSERT OR {taken} INTO result (run, key, state, attempt, finished, status, "case", outcome) '
                "VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    run.number,
                    result.case.key,
                    result.state,
                    result.attempt,
                    result.finished or _now(),
                    result.outcome.status.value,
                    json.dumps(case),
                    json.dumps(outcome),
                ),
            )

    def ask(self, run: Run, wanted: Iterable[tuple[Case, str]]) -> None:
        """Note the cases of a sweep, whether they run now or not, each with its state."""
        now = _now()
        self._ask(run, [Asked(case, state, now) for case, state in wanted])

    def _ask(self, run: Run, wanted: Iterable[Asked]) -> None:
        with self._writing():
            self._connection.executemany(
                'INSERT OR REPLACE INTO asked (run, key, state, moment, "case") VALUES (?, ?, ?, ?, ?)',
                [(run.number, a.case.key, a.state, a.moment, json.dumps(asdict(a.case))) for a in wanted],
            )

    def asked(self, run: Run) -> dict[str, Asked]:
        """The cases of a run as they were asked for last, by key."""
        rows = self._query('SELECT "case", state, moment FROM asked WHERE run = ?', (run.number,))
        found = [
            Asked(decoded(Case, self._json(case, "case"), f"{self.path}: case"), str(state), str(moment))
            for case, state, moment in rows
        ]
        return {one.case.key: one for one in found}

    def attempts(self, run: Run) -> dict[tuple[str, str], dict[int, str]]:
        """The status of each attempt that has run, by case and state. One whose machine was lost has not."""
        rows = self._query("SELECT key, state, attempt, status FROM result WHERE run = ? ORDER BY id", (run.number,))
        found: dict[tuple[str, str], dict[int, str]] = {}
        for key, state, attempt, status in rows:
            if status == Status.LOST:
                continue
            found.setdefault((str(key), str(state)), {})[self._whole(attempt)] = str(status)
        return found

    def results(self, run: Run) -> list[Attempt]:
        """All results of a run, the oldest first."""
        rows = self._query(
            'SELECT "case", attempt, finished, state, outcome FROM result WHERE run = ? ORDER BY id', (run.number,)
        )
        return [
            Attempt(
                decoded(Case, self._json(case, "case"), f"{self.path}: case"),
                self._whole(attempt),
                str(finished),
                str(state),
                self._outcome(outcome),
            )
            for case, attempt, finished, state, outcome in rows
        ]

    def _outcome(self, text: object) -> CaseResult:
        if not isinstance(text, str):
            raise SuiteError(f"{self.path}: outcome: expected text")
        try:
            return CaseResult.from_json(text)
        except SuiteError as error:
            raise SuiteError(f"{self.path}: {error}") from None

    def ask_again(self, run: Run, jobs: Mapping[tuple[str, str], Job], which: Sequence[str]) -> list[Job]:
        """Request another attempt at cases by how their last attempt ended. Requests are kept until they have a result.

        Args:
            jobs: The cases that may be run again, by key and state.
            which: Statuses of last attempts that ask for another. If earlier requests have no result yet, these
                are returned and none is added.
        """
        attempts = self.attempts(run)
        open_ = [one for one in self._open(run, attempts) if one[0] in jobs]
        if not open_:
            for key, made in attempts.items():
                last = max(made)
                if key in jobs and made[last] in which:
                    open_.append((key, last + 1))
            self._again(run, open_)
        return [Job(jobs[key].spec, jobs[key].case, jobs[key].settings, attempt) for key, attempt in open_]

    def _again(self, run: Run, wanted: Iterable[tuple[tuple[str, str], int]]) -> None:
        with self._writing():
            self._connection.executemany(
                "INSERT OR IGNORE INTO again (run, key, state, attempt) VALUES (?, ?, ?, ?)",
                [(run.number, *key, attempt) for key, attempt in wanted],
            )

    def _open(
        self, run: Run, attempts: Mapping[tuple[str, str], Mapping[int, str]]
    ) -> list[tuple[tuple[str, str], int]]:
        rows = self._query("SELECT key, state, attempt FROM again WHERE run = ?", (run.number,))
        return [
            ((str(key), str(state)), self._whole(attempt))
            for key, state, attempt in rows
            if self._whole(attempt) not in attempts.get((str(key), str(state)), {})
        ]

    def reruns(self, run: Run) -> dict[tuple[str, str], set[int]]:
        """The attempts that `ask_again` requested, by case and state."""
        found: dict[tuple[str, str], set[int]] = {}
        for key, state, attempt in self._query("SELECT key, state, attempt FROM again WHERE run = ?", (run.number,)):
            found.setdefault((str(key), str(state)), set()).add(self._whole(attempt))
        return found

    def merge(self, other: Database) -> int:
        """Copy the results that another database has and this one lacks. A second merge changes nothing.

        Returns:
            How many results were new.
        """
        new = 0
        for theirs in other.runs():
            mine = self.begin(theirs.name, theirs.versions)
            have = {(r.case.key, r.state, r.finished, r.outcome.host) for r in self.results(mine)}
            attempts = self.attempts(mine)
            asked, reruns = self.asked(mine), other.reruns(theirs)
            later = [
                one for key, one in other.asked(theirs).items() if key not in asked or asked[key].moment < one.moment
            ]
            self._ask(mine, later)
            for result in other.results(theirs):
                if (result.case.key, result.state, result.finished, result.outcome.host) in have:
                    continue
                taken = attempts.setdefault((result.case.key, result.state), {})
                attempt = result.attempt if result.attempt not in taken else max(taken) + 1
                taken[attempt] = result.outcome.status.value
                self.add(mine, Attempt(result.case, attempt, result.finished, result.state, result.outcome))
                if result.attempt in reruns.get((result.case.key, result.state), ()):
                    self._again(mine, [((result.case.key, result.state), attempt)])
                new += 1
        return new

    def _whole(self, value: object) -> int:
        if not isinstance(value, int) or not 0 <= value < _MOST_ROWS:
            raise SuiteError(f"{self.path}: a number got {value!r:.40}; expected one from 0 to {_MOST_ROWS}")
        return value

    def _json(self, text: object, what: str) -> Any:
        try:
            return json.loads(text) if isinstance(text, str) else None
        except (ValueError, RecursionError) as error:
            raise SuiteError(f"{self.path}: {what}: not JSON: {error}") from None


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="microseconds")
