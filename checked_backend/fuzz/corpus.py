"""The corpus and the results of fuzzing in a folder of records, kept as they come.

A record is a step of the run; reading them in order gives the state again. The folder is not trusted, because a
stranger may have written it: every field is checked, and a program from it can call nothing but known operations.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

from pydantic import ConfigDict, Field, TypeAdapter

from checked_backend.errors import FuzzError
from checked_backend.fuzz.program import FuzzProgram
from checked_backend.fuzz.results import Group, ProgramResult, callable_program
from checked_backend.runs.case import Status, decode, encode
from checked_backend.runs.folder import StoredRun, case_name

_FAILED = (Status.FAIL, Status.CRASH, Status.HANG)
_UNCONFIRMED = ""
_REASONS = 6
_Whole = Annotated[int, Field(ge=-(2**63), lt=2**63)]


@dataclass(frozen=True, slots=True)
class Entry:
    """A generated program and what came out for it.

    Attributes:
        text: The program as JSON; empty if its number gives none.
        result: Of a number that gives no program, *skipped* and why. *Lost* while a process is at it.
    """

    __pydantic_config__ = ConfigDict(strict=True)

    seed: _Whole
    number: _Whole
    text: str
    result: ProgramResult
    ops: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """``seed 0, program 17``."""
        return f"seed {self.seed}, program {self.number}"

    @property
    def program(self) -> FuzzProgram:
        """The program; if it fails with others as one, those."""
        return callable_program(self.result.program or self.text)

    @property
    def failed(self) -> bool:
        """Whether something is wrong with the compiler."""
        return self.result.status in _FAILED and bool(self.result.kind)


@dataclass(frozen=True, slots=True)
class Record:
    """A step of the run. Programs go by their names, groups by their signatures.

    Attributes:
        step: Steps are applied in this order.
        of: The program whose failure was put into a group.
        signature: That group; empty if the failure did not show again.
        group: The group as it is now; None if it is known.
        was: The group that it takes the place of, because its operator was found.
    """

    __pydantic_config__ = ConfigDict(strict=True)

    step: _Whole = 0
    programs: list[Entry] = field(default_factory=list)
    of: str = ""
    signature: str = ""
    group: Group | None = None
    was: str = ""

    @classmethod
    def from_json(cls, text: str) -> Record:
        """Read what a worker answered."""
        return decode(_RECORD, text, "a worker's answer")


_RECORD, _SETTINGS = TypeAdapter(Record), TypeAdapter(dict[str, str])


class Corpus(StoredRun[dict[str, str], Record]):
    """A fuzz in its folder, opened as `checked_backend.runs.folder.RunFolder` is.

    Attributes:
        settings: The facts that the results depend on.
    """

    def __init__(self, path: Path, *, write: bool = False) -> None:
        super().__init__(path, "fuzz", _SETTINGS, _RECORD, write=write)
        self.settings = self._stored or {}
        self._step = 0
        self._programs: dict[str, Entry] = {}
        self._groups: dict[str, Group] = {}
        self._group_of: dict[str, str] = {}
        for record in sorted(self._records, key=lambda record: record.step):
            self._apply(record)

    def _keep(self, what: str, record: Record) -> None:
        record = replace(record, step=self._step + 1)
        self._folder.add(case_name(f"{record.step:06} {what}", str(record.step)), encode(record))
        self._apply(record)

    def _apply(self, record: Record) -> None:
        self._step = record.step
        self._programs |= {entry.name: entry for entry in record.programs}
        if (group := record.group) is not None:
            last = max((other.number for other in self._groups.values()), default=0)
            old, there = self._groups.pop(record.was, None), self._groups.get(group.signature)
            joined = group if there is None else there.joined(group)
            number = there.number if there else old.number if old else 1 + last
            self._groups[group.signature] = replace(joined, number=number)
            for name, signature in self._group_of.items():
                if record.was and signature == record.was:
                    self._group_of[name] = group.signature
        if record.of:
            self._group_of[record.of] = record.signature

    def settle(self, settings: Mapping[str, str]) -> None:
        """Write what the results depend on; raise a FuzzError if the folder was begun with something else."""
        if not self.settings:
            self.settings = {name: value for name, value in settings.items() if value}
            self._folder.write_plan(_SETTINGS.dump_json(dict(self.settings)).decode())
        for name, value in settings.items():
            there = self.settings.get(name, "")
            if there != value:
                raise FuzzError(f"{self.path}: was begun with {name} {there!r}, not {value!r}; give another --out")

    # programs

    def add(self, programs: Sequence[Entry]) -> None:
        """Keep programs and what came out for them."""
        if programs:
            self._keep("programs", Record(programs=list(programs)))

    def missing(self, seed: int, busy: Container[int]) -> Iterator[int]:
        """The numbers of a seed's programs that nothing came out for, and that nobody is busy with."""
        done = {entry.number for entry in self._programs.values() if entry.seed == seed}
        return (number for number in itertools.count() if number not in done and number not in busy)

    def failures(self) -> list[Entry]:
        """The programs that failed, and belong to no group yet."""
        known = {*self._groups, _UNCONFIRMED}
        return [one for one in self.checked if one.failed and self._group_of.get(one.name) not in known]

    def unconfirmed(self) -> list[tuple[str, str]]:
        """The programs whose failures did not show again, each with what failed."""
        return [(one.name, one.result.message) for one in self.checked if self._group_of.get(one.name) == _UNCONFIRMED]

    def inconclusive(self) -> list[tuple[str, str]]:
        """The programs without a verdict, each with the reason."""
        undecided = (Status.INCONCLUSIVE, Status.OUT_OF_MEMORY)
        return [(one.name, one.result.message) for one in self.checked if one.result.status in undecided]

    @property
    def checked(self) -> list[Entry]:
        """The programs that were checked."""
        return [entry for entry in self._programs.values() if entry.text]

    @property
    def compiled(self) -> int:
        """How many of them were compiled, at least in part."""
        return sum(entry.result.compiled for entry in self.checked)

    @property
    def ops(self) -> int:
        """How many distinct operations they have."""
        return len({op for entry in self.checked for op in entry.ops})

    def left_out(self) -> Counter[str]:
        """Why how many numbers give no program."""
        return Counter(one.result.message for one in self._programs.values() if not one.text)

    def left_out_words(self) -> str:
        """``31 of the generator's programs were left out: sort, which no program may call (20), ...``."""
        left_out = self.left_out()
        most = ", ".join(f"{reason} ({count})" for reason, count in left_out.most_common(_REASONS))
        more = "" if len(left_out) <= _REASONS else ", ..."
        return f"{left_out.total()} of the generator's programs were left out: {most}{more}"

    # groups

    def groups(self) -> list[Group]:
        """All groups, those met most first."""
        met = Counter(self._group_of.values())
        found = [replace(group, met=met[signature]) for signature, group in self._groups.items()]
        return sorted(
            found, key=lambda group: (-group.confirmed, group.difference is not None, -group.met, group.number)
        )

    def signatures(self) -> set[str]:
        """The signatures of all confirmed groups."""
        return {signature for signature, group in self._groups.items() if group.confirmed}

    def assign(self, entry: Entry, signature: str) -> None:
        """Count a failure in a known group; the empty signature says that it did not show again."""
        self._keep("group", Record(of=entry.name, signature=signature))

    def put(self, group: Group, of: Entry | None = None, was: str = "") -> Group:
        """Add a group, or join it with the one of its signature; the group as it is now.

        Given are the program that failed so, and the signature of a group whose place it takes.
        """
        there = self._groups.get(group.signature)
        changes = bool(was) or there is None or there.joined(group) != there
        of_name = "" if of is None else of.name
        self._keep("group", Record(0, [], of_name, group.signature, group if changes else None, was))
        return self._groups[group.signature]
