"""The files of a recorded run: one for each process, with one line of JSON for each tensor of each recorded call."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TextIO

from pydantic import Field, TypeAdapter

from checked_backend.errors import CheckedBackendError
from checked_backend.findings.values import Count, Flag, Index, Real
from checked_backend.report.codec import json_values, validated

__all__ = ["PLAIN", "Place", "RecordFile", "TensorRecord", "noise_folders", "read_run", "written_by"]

PLAIN = "plain"
"""The folder of the run as it is; those beside it are of runs in which every rounding is random."""

_SCHEMA, _VERSION = "checked_backend.record", 1
_LONGEST = 1 << 20  # characters of one line
_MOST = 5_000_000  # lines of one file

_Size = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]

Place = tuple[str, str, int, str]
"""The identity of a recorded tensor: process, region, call, subject."""


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """One tensor in one call.

    Attributes:
        region: The region, without Dynamo's identifier of the compilation.
        call: Which call of it, from 1.
        subject: ``input[x]``, ``output[0]``, ``grad_output[0]`` or ``grad[weight]``.
        dtype: Its dtype.
        shape: Its shape.
        bits: A checksum of all its bits; None where that cannot be had.
        rms: Root mean square of its finite elements.
        max: Greatest magnitude of them.
        nonfinite: How many elements are no numbers.
        roundoff: The unit roundoff of its dtype; 0 for integers.
        sample: Some of its elements, at places that follow from their number alone.
        drew: Whether random numbers were drawn in the call before it was seen.
        products: The unit roundoff with which the region multiplies numbers in float32, if that is coarser than theirs.
        products_outside: The same for other code, as far as the settings allow it.
        projections: Sums of all its finite elements, each with a sign that follows from its place, over the root of
            their number: what no sample shows, as two rows that changed places, moves them by its root mean square.
        device: The kind of device that it was on: ``cuda``, whatever its number.
        unread: Why its values could not be read; empty if they were.
    """

    region: str
    call: Count
    subject: str
    dtype: str
    shape: Index
    bits: int | None
    rms: _Size
    max: _Size
    nonfinite: Count
    roundoff: _Size
    sample: tuple[Real, ...]
    device: str = ""
    unread: str = ""
    projections: tuple[Real, ...] = ()
    drew: Flag = False
    products: _Size = 0.0
    products_outside: _Size = 0.0


_TENSOR = TypeAdapter(TensorRecord)


@dataclass(slots=True)
class ProcessRecord:
    """The records of one process.

    Attributes:
        header: Its versions and its command line.
        tensors: Its tensors in the order in which they were seen.
    """

    header: Mapping[str, Any] = field(default_factory=dict)
    tensors: dict[Place, TensorRecord] = field(default_factory=dict)


class RecordFile:
    """Writes the file of this process.

    Args:
        rank: The rank of the process, or "0".
        header: The facts about the process.
    """

    def __init__(self, folder: Path, rank: str, header: Mapping[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = _claimed(folder, rank)
        self._line({"schema": _SCHEMA, "version": _VERSION, **header})

    def add(self, record: TensorRecord) -> None:
        """Write one tensor. What is written survives the process."""
        self._line(json_values(record))

    def flush(self) -> None:
        """Hand everything to the system."""
        self._file.flush()

    def close(self) -> None:
        """End the file."""
        self._file.close()

    def _line(self, values: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(values, allow_nan=False) + "\n")


def _claimed(folder: Path, rank: str) -> TextIO:
    """A file that no other process has: processes of one rank are numbered as they come."""
    number = 0
    while True:
        try:
            descriptor = os.open(folder / f"rank{rank}-{number}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            number += 1
            continue
        return os.fdopen(descriptor, "w", encoding="ascii")


def noise_folders(folder: Path) -> list[Path]:
    """The folders of a recording's noise runs."""
    return sorted(path for path in folder.glob("noise-*") if path.is_dir())


def written_by(folder: Path) -> bool:
    """Whether any process left a record in a folder."""
    return any(folder.glob("rank*.jsonl"))


def read_run(folder: Path) -> dict[str, ProcessRecord]:
    """Read the records of all processes of a run.

    Returns:
        By the name of the process.

    Raises:
        CheckedBackendError: A file is none of a recording.
    """
    if not written_by(folder):
        raise CheckedBackendError(f"{folder}: no recording of a program that compiled (checked-backend record)")
    return {path.stem: _read(path) for path in sorted(folder.glob("rank*.jsonl"))}


def _read(path: Path) -> ProcessRecord:
    found = ProcessRecord()
    for number, line in enumerate(_lines(path)):
        try:
            values = json.loads(line)
            if not number:
                found.header = _header(values)
                continue
            record = validated(_TENSOR, values, "tensor")
        except (CheckedBackendError, ValueError, TypeError, KeyError, RecursionError) as error:
            raise CheckedBackendError(f"{path}:{number + 1}: no line of a recording: {error}") from None
        found.tensors[path.stem, record.region, record.call, record.subject] = record
    return found


def _header(values: Any) -> Mapping[str, Any]:
    if (values["schema"], values["version"]) != (_SCHEMA, _VERSION):
        raise ValueError(f"it is {values['schema']} {values['version']}")
    if not isinstance(values.get("environment", {}), dict):
        raise TypeError("its environment is no object")
    header: Mapping[str, Any] = values
    return header


def _lines(path: Path) -> Iterator[str]:
    if not path.is_file():
        raise CheckedBackendError(f"{path}: no file")
    with path.open(encoding="ascii", errors="backslashreplace") as file:  # JSON has ASCII; other bytes fail in strings
        for _ in range(_MOST):
            line = file.readline(_LONGEST)
            if not line:
                return
            if not line.endswith("\n"):
                return  # the process was killed as it wrote this
            yield line
    raise CheckedBackendError(f"{path}: more than {_MOST} lines")
