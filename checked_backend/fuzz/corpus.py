"""The corpus and the results of fuzzing in a folder of records, kept as they come.

A record is a step of the run; reading them in order gives the state again. The folder is not trusted, because a
stranger may have written it: every field is checked, and a program from it can call nothing but known operations.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

from pydantic import ConfigDict, Field, TypeAdapter

from checked_backend.errors import FuzzError
from checked_backend.fuzz.program import FuzzProgram
from checked_backend.fuzz.results import Group, ProgramResult, callable_program
from checked_backend.runs.case import encode
from checked_backend.runs.folder import StoredRun, case_name
from checked_backend.runs.status import Status

UNSETTLED = "the process that checked it together with others ended, and alone it was not checked"
"""How the message of such a program begins."""

_DECIDED = (Status.PASS, Status.FAIL, Status.CRASH, Status.HANG)
_FAILED = (Status.FAIL, Status.CRASH, Status.HANG)
_UNCONFIRMED = ""
_Whole = Annotated[int, Field(ge=-(2**63), lt=2**63)]


@dataclass(frozen=True, slots=True)
class Entry:
    """A program of the corpus.

    Attributes:
        alike: Programs with the same text here may share a compile.
        covers: Its operations with their dtypes.
    """

    __pydantic_config__ = ConfigDict(strict=True)

    seed: _Whole
    number: _Whole
    text: str
    alike: str
    covers: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """``seed 0, program 17``."""
        return f"seed {self.seed}, program {self.number}"

    @property
    def program(self) -> FuzzProgram:
        """The program."""
        return callable_program(self.text)


@dataclass(frozen=True, slots=True)
class Record:
    """A step of the run. Programs go by their names, groups by their signatures.

    Attributes:
        step: Steps are applied in this order.
        programs: Programs that were generated.
        results: What came out for programs.
        of: The program whose failure was put into a group.
        signature: That group; empty if the failure did not show again.
        group: The group as it is now; None if it is known.
        was: The group that it takes the place of, because its operator was found.
    """

    __pydantic_config__ = ConfigDict(strict=True)

    step: _Whole
    programs: list[Entry] = field(default_factory=list)
    results: dict[str, ProgramResult] = field(default_factory=dict)
    of: str = ""
    signature: str = ""
    group: Group | None = None
    was: str = ""


_RECORD, _SETTINGS = TypeAdapter(Record), TypeAdapter(dict[str, str])


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


class Corpus(StoredRun[dict[str, str], Record]):
    """A folder of fuzzing.

    Attributes:
        settings: The facts that the results depend on.

    Args:
        write: Make the folder if it is missing, and lock it against others that write.

    Raises:
        CheckedBackendError: The folder has something else in it, or another process has locked it.
    """

    def __init__(self, path: Path, *, write: bool = False) -> None:
        super().__init__(path, "fuzz", _SETTINGS, _RECORD, write=write)
        self.settings = self._stored or {}
        self._step = 0
        self._programs: dict[str, Entry] = {}
        self._results: dict[str, ProgramResult] = {}
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
        for entry in record.programs:
            self._programs.setdefault(entry.name, entry)
        self._results |= record.results
        if record.group is not None:
            self._put(record.group, record.was)
        if record.of:
            self._group_of[record.of] = record.signature

    def settle(self, settings: Mapping[str, str]) -> None:
        """Write what the results depend on, or see that it is what the folder was begun with.

        Raises:
            FuzzError: The folder was begun with others.
        """
        if not self.settings:
            self.settings = {name: value for name, value in settings.items() if value}
            self._folder.write_plan(_SETTINGS.dump_json(dict(self.settings)).decode())
        for name, value in settings.items():
            there = self.settings.get(name, "")
            if there != value:
                raise FuzzError(f"{self.path}: was begun with {name} {there!r}, not {value!r}; give another --out")

    # programs

    def add_programs(self, programs: Sequence[Entry]) -> None:
        """Add generated programs."""
        self._keep("programs", Record(0, programs=list(programs)))

    def next_number(self, seed: int) -> int:
        """The number after the last generated program of a seed."""
        return max((entry.number + 1 for entry in self._programs.values() if entry.seed == seed), default=0)

    def waiting(self) -> list[Entry]:
        """The programs that were not checked yet."""
        return [entry for name, entry in self._programs.items() if name not in self._results]

    def check_unsettled_again(self) -> None:
        """Let the programs wait again whose process ended while others shared it, and that were not checked alone."""
        self._results = {
            name: result for name, result in self._results.items() if not result.message.startswith(UNSETTLED)
        }

    def failures(self) -> list[tuple[Entry, ProgramResult]]:
        """The programs that failed, and belong to no group yet."""
        known = {*self._groups, _UNCONFIRMED}
        return [
            (self._programs[name], result)
            for name, result in self._of_status(*_FAILED)
            if self._group_of.get(name) not in known
        ]

    def add_results(self, results: Mapping[str, ProgramResult]) -> None:
        """Keep what came out for programs, by their names."""
        self._keep("results", Record(0, results=dict(results)))

    def unconfirmed(self) -> list[tuple[str, str]]:
        """The programs whose failures did not show again, each with what failed."""
        gone = [name for name in self._checked if self._group_of.get(name) == _UNCONFIRMED]
        return [(name, self._results[name].message) for name in gone]

    def inconclusive(self) -> list[tuple[str, str]]:
        """The programs without a verdict, each with the reason."""
        undecided = self._of_status(Status.INCONCLUSIVE, Status.OUT_OF_MEMORY)
        return [(name, result.message) for name, result in undecided]

    def _of_status(self, *statuses: Status) -> list[tuple[str, ProgramResult]]:
        return [(name, self._results[name]) for name in self._checked if self._results[name].status in statuses]

    @property
    def _checked(self) -> list[str]:
        return [name for name in self._programs if name in self._results]

    def totals(self) -> Totals:
        """Counts over the programs that were checked."""
        checked = self._checked
        pairs = {pair for name in checked for pair in self._programs[name].covers}
        return Totals(
            Counter(self._results[name].status.value for name in checked),
            sum(self._results[name].compiled for name in checked),
            len({pair.split(" ")[0] for pair in pairs}),
            len(pairs),
        )

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
        self._keep("group", Record(0, of=entry.name, signature=signature))

    def put(self, group: Group, of: Entry | None = None, was: str = "") -> Group:
        """Add a group, or join it with the one of its signature.

        Args:
            of: The program that failed so.
            was: The signature of the group whose place it takes.

        Returns:
            The group as it is now.
        """
        there = self._groups.get(group.signature)
        changes = bool(was) or there is None or there.joined(group) != there
        of_name = "" if of is None else of.name
        self._keep("group", Record(0, [], {}, of_name, group.signature, group if changes else None, was))
        return self._groups[group.signature]

    def _put(self, group: Group, was: str) -> None:
        last = max((other.number for other in self._groups.values()), default=0)
        old, there = self._groups.pop(was, None), self._groups.get(group.signature)
        joined = group if there is None else there.joined(group)
        number = there.number if there else old.number if old else 1 + last
        self._groups[group.signature] = replace(joined, number=number)
        for name, signature in self._group_of.items():
            if was and signature == was:
                self._group_of[name] = group.signature
