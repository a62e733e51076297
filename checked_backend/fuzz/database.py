"""The corpus and the results of fuzzing in one SQLite file, committed as they come.

The file is not trusted, because a stranger may have written it: every field is checked, and a program from it can call
nothing but known operations.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from checked_backend.errors import FuzzError
from checked_backend.fuzz.program import FuzzProgram, decode_program, encode_program
from checked_backend.fuzz.results import Group, ProgramResult
from checked_backend.fuzz.source import function_of
from checked_backend.fuzz.sqlite_file import FUZZ, Format, SqliteFile
from checked_backend.runs.status import Status

__all__ = ["UNSETTLED", "Corpus", "Entry", "Totals"]

_SCHEMA = """
CREATE TABLE setting (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE program (
    id INTEGER PRIMARY KEY, seed INTEGER NOT NULL, number INTEGER NOT NULL, program TEXT NOT NULL, covers TEXT NOT NULL,
    alike TEXT NOT NULL, status TEXT NOT NULL DEFAULT '', result TEXT NOT NULL DEFAULT '', bug INTEGER,
    UNIQUE (seed, number));
CREATE TABLE bug (
    id INTEGER PRIMARY KEY, signature TEXT NOT NULL UNIQUE, content TEXT NOT NULL, program TEXT NOT NULL,
    result TEXT NOT NULL);
"""
_FORMAT = Format(FUZZ, 1, _SCHEMA, frozenset({"setting", "program", "bug"}), "fuzz", "fuzz", FuzzError)
UNSETTLED = "the process that checked it together with others ended, and alone it was not checked"
"""How the message of such a program begins."""

_MOST_MET = 10**12
_DECIDED = (Status.PASS, Status.FAIL, Status.CRASH, Status.HANG)
_CONTENT: Mapping[str, type] = MappingProxyType(
    {
        **dict.fromkeys(("kind", "detail", "stage", "op", "script"), str),
        **dict.fromkeys(("confirmed", "script_shows", "localized"), bool),
        "met": int,
    }
)
"""The fields of a group that are kept as JSON."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A program of the corpus.

    Attributes:
        name: ``seed 0, program 17``.
        alike: Programs with the same text here may share a compile.
    """

    number: int
    name: str
    text: str
    alike: str

    @property
    def program(self) -> FuzzProgram:
        """The program."""
        return _callable_program(self.text)


@dataclass(frozen=True, slots=True)
class Totals:
    """Counts over a corpus.

    Attributes:
        statuses: Programs by status; those that were not checked yet are not among them.
        compiled: How many of those checked were compiled, at least in part.
        ops: Distinct operations of programs that were checked.
        pairs: Distinct pairs of an operation and a dtype.
    """

    statuses: Mapping[str, int]
    compiled: int
    ops: int
    pairs: int

    @property
    def checked(self) -> int:
        """How many programs were checked."""
        return sum(self.statuses.values())

    @property
    def decided(self) -> int:
        """How many of them have a verdict, or took their process with them."""
        return sum(self.statuses.get(status.value, 0) for status in _DECIDED)


def _callable_program(text: str) -> FuzzProgram:
    """A program that has a source.

    Raises:
        FuzzError: It is none: a call has too few arguments, or others than it takes.
    """
    program = decode_program(text)
    try:
        function_of([program])
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise FuzzError(f"a program: {type(error).__name__}: {error}") from None
    return program


class Corpus(SqliteFile):
    """A database of fuzzing.

    Args:
        write: Create it if it is missing, and lock it against others that write.

    Raises:
        FuzzError: The file is no such database, or another process has locked it.
    """

    def __init__(self, path: Path, *, write: bool = False) -> None:
        super().__init__(path, _FORMAT, write=write)

    # settings

    def settle(self, settings: Mapping[str, str]) -> None:
        """Write what the results depend on, or see that it is what the file was begun with.

        Raises:
            FuzzError: The file was begun with others.
        """
        there = self.settings()
        if not there:
            rows = [(name, value) for name, value in settings.items() if value]
            with self._writing():
                self._connection.executemany("INSERT INTO setting (name, value) VALUES (?, ?)", rows)
            return
        for name, value in settings.items():
            if there.get(name, "") != value:
                raise FuzzError(
                    f"{self.path}: was begun with {name} {there.get(name)!r}, not {value!r}; give another --db"
                )

    def settings(self) -> dict[str, str]:
        """The facts that the results depend on."""
        return {str(name): str(value) for name, value in self._query("SELECT name, value FROM setting")}

    # programs

    def add_programs(self, seed: int, made: Mapping[str, Any]) -> None:
        """Add generated programs, by their number."""
        rows = [(seed, int(n), one["program"], json.dumps(one["covers"]), one["alike"]) for n, one in made.items()]
        with self._writing():
            self._connection.executemany(
                "INSERT OR IGNORE INTO program (seed, number, program, covers, alike) VALUES (?, ?, ?, ?, ?)", rows
            )

    def next_number(self, seed: int) -> int:
        """The number after the last generated program of a seed."""
        ((last,),) = self._query("SELECT max(number) FROM program WHERE seed = ?", (seed,))
        return 0 if last is None else self._whole(last) + 1

    def waiting(self) -> list[Entry]:
        """The programs that were not checked yet."""
        return [entry for entry, _ in self._programs("status = ''")]

    def check_unsettled_again(self) -> None:
        """Let the programs wait again whose process ended while others shared it, and that were not checked alone."""
        with self._writing():
            self._connection.execute(
                "UPDATE program SET status = '', result = '' WHERE status = 'inconclusive' AND instr(result, ?) > 0",
                (f'"message": "{UNSETTLED}',),
            )

    def failures(self) -> list[tuple[Entry, ProgramResult]]:
        """The programs that failed, and belong to no group yet."""
        found = self._programs("bug IS NULL AND status IN ('fail', 'crash', 'hang')")
        return [(entry, ProgramResult.from_json(result)) for entry, result in found]

    def add_result(self, number: int, result: ProgramResult) -> None:
        """Write what came out for a program."""
        with self._writing():
            self._connection.execute(
                "UPDATE program SET status = ?, result = ? WHERE id = ?",
                (result.status.value, result.to_json(), number),
            )

    def assign(self, number: int, bug: int | None) -> None:
        """Say to which group a program belongs; 0 for none, because its failure was not confirmed."""
        with self._writing():
            self._connection.execute("UPDATE program SET bug = ? WHERE id = ?", (bug, number))

    def unconfirmed(self) -> list[tuple[str, str]]:
        """The programs whose failures did not show again, each with what failed."""
        return self._messages("bug = 0")

    def inconclusive(self) -> list[tuple[str, str]]:
        """The programs without a verdict, each with the reason."""
        return self._messages("status IN ('inconclusive', 'out of memory')")

    def _messages(self, where: str) -> list[tuple[str, str]]:
        return [(entry.name, ProgramResult.from_json(result).message) for entry, result in self._programs(where)]

    def _programs(self, where: str) -> list[tuple[Entry, str]]:
        query = f"SELECT id, seed, number, program, alike, result FROM program WHERE {where} ORDER BY id"
        return [
            (Entry(self._whole(row), self._name(seed, number), str(text), str(alike)), str(result))
            for row, seed, number, text, alike, result in self._query(query)
        ]

    def totals(self) -> Totals:
        """Counts over the programs that were checked."""
        statuses: Counter[str] = Counter()
        compiled = 0
        pairs: set[str] = set()
        for status, covers, result in self._query("SELECT status, covers, result FROM program WHERE status != ''", ()):
            statuses[Status.of(status, str(self.path)).value] += 1
            pairs.update(str(one) for one in self._list(covers))
            compiled += ProgramResult.from_json(result).compiled
        return Totals(dict(statuses), compiled, len({pair.split(" ")[0] for pair in pairs}), len(pairs))

    # groups

    def groups(self) -> list[Group]:
        """All groups, those met most first."""
        rows = self._query("SELECT id, content, program, result FROM bug")
        found = [self._group(*row) for row in rows]
        return sorted(
            found, key=lambda group: (-group.confirmed, group.difference is not None, -group.met, group.number)
        )

    def _group(self, number: object, content: object, program: object, result: object) -> Group:
        try:
            raw = json.loads(str(content))
            given = {name: raw[name] for name in _CONTENT}
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise FuzzError(f"{self.path}: a group: {type(error).__name__}: {error}") from None
        for name, kind in _CONTENT.items():
            if not isinstance(given[name], kind):
                raise FuzzError(f"{self.path}: a group: {name} got {given[name]!r:.80}, of a wrong type")
        if not 1 <= given["met"] < _MOST_MET:
            raise FuzzError(f"{self.path}: a group: met got {given['met']!r:.80}; expected a count")
        program = _callable_program(str(program))
        return Group(**given, program=program, result=ProgramResult.from_json(str(result)), number=self._whole(number))

    def put(self, group: Group) -> Group:
        """Add a group, or join it with the one of its signature. A group that has a number is moved there.

        Returns:
            The group as it is in the file now.
        """
        groups = self.groups()
        there = next((one for one in groups if one.signature == group.signature), None)
        now = next((one for one in groups if one.number == group.number), None)
        joined = group if now is None else replace(group, met=max(group.met, now.met))  # more were met in between
        if there is not None and there.number != group.number:
            joined = there.joined(joined)
        content = json.dumps({name: getattr(joined, name) for name in _CONTENT})
        values = (joined.signature, content, encode_program(joined.program), joined.result.to_json())
        with self._writing():
            if joined.number:
                self._connection.execute(
                    "UPDATE bug SET signature = ?, content = ?, program = ?, result = ? WHERE id = ?",
                    (*values, joined.number),
                )
                number = joined.number
            else:
                cursor = self._connection.execute(
                    "INSERT INTO bug (signature, content, program, result) VALUES (?, ?, ?, ?)", values
                )
                number = int(cursor.lastrowid or 0)
            if there is not None and group.number and there.number != group.number:
                self._connection.execute("UPDATE program SET bug = ? WHERE bug = ?", (there.number, group.number))
                self._connection.execute("DELETE FROM bug WHERE id = ?", (group.number,))
        return replace(joined, number=number)

    def met_again(self, group: Group) -> None:
        """Count one more program that failed as a group's did."""
        found = next((one for one in self.groups() if one.number == group.number), None)
        if found is not None:
            self.put(replace(found, met=found.met + 1))

    def signatures(self) -> set[str]:
        """The signatures of all confirmed groups."""
        return {group.signature for group in self.groups() if group.confirmed}

    def _name(self, seed: object, number: object) -> str:
        return f"seed {self._whole(seed)}, program {self._whole(number)}"

    def _whole(self, raw: object) -> int:
        if not isinstance(raw, int):
            raise FuzzError(f"{self.path}: expected a whole number, got {raw!r:.80}")
        return raw

    def _list(self, text: object) -> list[Any]:
        try:
            raw = json.loads(str(text))
        except (ValueError, RecursionError) as error:
            raise FuzzError(f"{self.path}: not JSON: {error}") from None
        return raw if isinstance(raw, list) else []
