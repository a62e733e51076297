"""The files of a recorded run: one for each process, with one line of JSON for each tensor of each recorded call."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from checked_backend.errors import CheckedBackendError
from checked_backend.report.codec import json_values
from checked_backend.runs.case import decode

PLAIN = "plain"
"""The folder of the run as it is; those beside it are of runs in which every rounding is random."""

_LONGEST = 1 << 20  # characters of one line
_MOST = 5_000_000  # lines of one file

Place = tuple[str, str, int, str]
"""The identity of a recorded tensor: process, region, call, subject."""

_Size = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """One tensor in one call.

    Attributes:
        region: The region, without Dynamo's identifier of the compilation.
        call: Which call of it, from 1.
        subject: ``input[x]``, ``output[0]``, ``grad_output[0]`` or ``grad[weight]``.
        bits: A checksum of all its bits; None where that cannot be had.
        rms: Root mean square of its finite elements.
        nonfinite: How many elements are no numbers.
        roundoff: The unit roundoff of its dtype; 0 for integers.
        sample: Some of its elements, at places that follow from their number alone.
        device: The kind of device that it was on: ``cuda``, whatever its number.
        unread: Why its values could not be read; empty if they were.
        projections: Sums of all its finite elements, each with a sign that follows from its place, over the root of
            their number: what no sample shows, as two rows that changed places, moves them by its root mean square.
        drew: Whether random numbers were drawn in the call before it was seen.
        products: The unit roundoff with which the region multiplies numbers in float32, if that is coarser than theirs.
        products_outside: The same for other code, as far as the settings allow it.
    """

    region: str
    call: int
    subject: str
    dtype: str
    shape: tuple[int, ...]
    bits: int | None = None
    rms: _Size = 0.0
    nonfinite: int = 0
    roundoff: _Size = 0.0
    sample: tuple[float, ...] = ()
    device: str = ""
    unread: str = ""
    projections: tuple[float, ...] = ()
    drew: bool = False
    products: _Size = 0.0
    products_outside: _Size = 0.0


@dataclass(slots=True)
class Recording:
    """The records of all processes of a run, each tensor in the order in which its process saw it.

    The versions and devices of each process are by its name.
    """

    tensors: dict[Place, TensorRecord] = field(default_factory=dict)
    environments: dict[str, Mapping[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Header:
    schema: Literal["checked_backend.record"]
    version: Literal[1]
    environment: Mapping[str, Any] = field(default_factory=dict)


_HEADER: TypeAdapter[_Header] = TypeAdapter(_Header)
_TENSOR: TypeAdapter[TensorRecord] = TypeAdapter(TensorRecord)


class RecordFile:
    """A file of records that no other process has, with facts about it: those of one rank are numbered as they come."""

    def __init__(self, folder: Path, rank: str, header: Mapping[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for number in itertools.count():
            with contextlib.suppress(FileExistsError):
                self.file = (folder / f"rank{rank}-{number}.jsonl").open("x", encoding="ascii")
                break
        self._line({"schema": "checked_backend.record", "version": 1, **header})

    def add(self, record: TensorRecord) -> None:
        """Write one tensor."""
        self._line(json_values(record))

    def _line(self, values: Mapping[str, Any]) -> None:
        self.file.write(json.dumps(values, allow_nan=False) + "\n")


def written_by(folder: Path) -> bool:
    """Whether any process left a record in a folder."""
    return any(folder.glob("rank*.jsonl"))


def read_run(folder: Path) -> Recording:
    """Read the records of all processes of a run; a CheckedBackendError if there is none, or a file has others."""
    if not written_by(folder):
        raise CheckedBackendError(f"{folder}: no recording of a program that compiled (checked-backend record)")
    found = Recording()
    for path in sorted(folder.glob("rank*.jsonl")):
        found.environments[path.stem] = {}
        for number, line in enumerate(_lines(path), 1):
            where = f"{path}:{number}: no line of a recording"
            if number == 1:
                found.environments[path.stem] = decode(_HEADER, line, where).environment
            else:
                record = decode(_TENSOR, line, where)
                found.tensors[path.stem, record.region, record.call, record.subject] = record
    return found


def _lines(path: Path) -> Iterator[str]:
    if not path.is_file():
        raise CheckedBackendError(f"{path}: no file")
    with path.open(encoding="ascii", errors="backslashreplace") as file:  # JSON has ASCII; other bytes fail in strings
        for _ in range(_MOST):
            line = file.readline(_LONGEST)
            if not line.endswith("\n"):
                return  # the end, or the process was killed as it wrote this
            yield line
    raise CheckedBackendError(f"{path}: more than {_MOST} lines")
