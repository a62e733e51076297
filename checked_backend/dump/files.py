"""The files of a dump as bytes: checksums, and reading without trust."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from pydantic import BaseModel, ValidationError
from safetensors import SafetensorError, safe_open

from checked_backend.dump.schema import FORMAT, VERSION, Storage
from checked_backend.dump.tensors import fingerprint
from checked_backend.errors import DumpError

__all__ = ["check_memory", "read_json", "read_regions", "read_text", "sha256", "with_checksum"]

_MAX_JSON = 1 << 28
_ModelT = TypeVar("_ModelT", bound=BaseModel)


def sha256(data: bytes) -> str:
    """The checksum of a text file."""
    return hashlib.sha256(data).hexdigest()


def with_checksum(document: Mapping[str, Any]) -> dict[str, Any]:
    """The document with its format, version and checksum."""
    full = {"format": FORMAT, "version": VERSION, **document}
    return {**full, "checksum": _checksum(full)}


def read_json(path: Path, model: type[_ModelT]) -> _ModelT:
    """Read and validate a JSON file of a dump.

    Raises:
        DumpError: It is missing, truncated, edited, of a newer format, or not what it should be.
    """
    data = _read(path)
    try:
        document = json.loads(data, parse_constant=_no_constant, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise DumpError(f"{path}: not JSON, or truncated: {error}") from None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise DumpError(f"{path}: not a file of a dump: 'format' is not {FORMAT!r}")
    version = document.get("version")
    if type(version) is not int or version < 1:
        raise DumpError(f"{path}: 'version' is {version!r}, not a number of 1 or more")
    if version > VERSION:
        raise DumpError(f"{path}: version {version} is newer than {VERSION}, which this package reads. Update it.")
    found = document.pop("checksum", None)
    try:
        expected = _checksum(document)
    except RecursionError:
        raise DumpError(f"{path}: nested too deeply") from None
    if found != expected:
        raise DumpError(f"{path}: the checksum does not fit: the file was edited or damaged. Dump the graph again.")
    try:
        return model.model_validate({**document, "checksum": found})
    except (ValidationError, RecursionError) as error:
        raise DumpError(f"{path}: {_first_problem(error)}") from None


def read_text(path: Path, expected: str) -> str:
    """Read a text file whose checksum is known.

    Raises:
        DumpError: It is missing, or not the file that was written.
    """
    data = _read(path)
    if sha256(data) != expected:
        raise DumpError(f"{path}: not the file that was dumped: edited, truncated or damaged. Dump the graph again.")
    return data.decode("utf-8", "replace")


def check_memory(path: Path, needed: int) -> None:
    """Refuse what is larger than this machine's memory, before any of it is asked for.

    An operating system that promises more memory than there is would kill the process later.

    Raises:
        DumpError: They are.
    """
    if not hasattr(os, "sysconf"):
        return  # Windows, which does not promise what it lacks
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > there:
        raise DumpError(
            f"{path}: its tensors need {needed / 2**30:,.1f} GiB; this machine has {there / 2**30:,.1f} GiB"
        )


def read_regions(path: Path, storages: Sequence[Storage]) -> dict[str, torch.Tensor]:
    """Read the bytes of storages from a safetensors file.

    Raises:
        DumpError: A storage is missing, of another size, or has other contents than were written.
    """
    if path.is_symlink() or not path.is_file():
        raise DumpError(f"{path}: missing, or not a regular file")
    wanted = {f"storage_{i}": storage for i, storage in enumerate(storages) if storage.fingerprint is not None}
    check_memory(path, sum(storage.end - storage.start for storage in wanted.values()))
    found: dict[str, torch.Tensor] = {}
    try:
        with safe_open(path, framework="pt") as stream:
            if set(stream.keys()) != set(wanted):
                raise DumpError(f"{path}: holds other storages than those recorded")
            for name in wanted:
                found[name] = stream.get_tensor(name)
    except (SafetensorError, OSError, RuntimeError, ValueError) as error:
        raise DumpError(f"{path}: not a safetensors file, or truncated: {error}") from None
    for name, storage in wanted.items():
        data = found[name]
        if data.dtype is not torch.uint8 or tuple(data.shape) != (storage.end - storage.start,):
            raise DumpError(f"{path}: {name} does not have the recorded size")
        if fingerprint(data) != storage.fingerprint:
            raise DumpError(f"{path}: the contents of {name} are not those that were dumped")
    return found


def _checksum(document: Mapping[str, Any]) -> str:
    return sha256(json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii"))


def _no_constant(text: str) -> float:
    raise ValueError(f"{text} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:60]} is out of range")
    return value


def _read(path: Path) -> bytes:
    # no links: the names of a stranger's files must not lead out of the folder
    if path.is_symlink() or not path.is_file():
        raise DumpError(f"{path}: missing, or not a regular file")
    try:
        if path.stat().st_size > _MAX_JSON:
            raise DumpError(f"{path}: larger than {_MAX_JSON >> 20} MiB")
        return path.read_bytes()
    except OSError as error:
        raise DumpError(f"{path}: cannot be read: {error.strerror or error}") from None


def _first_problem(error: ValidationError | RecursionError) -> str:
    if isinstance(error, RecursionError):
        return "nested too deeply"
    problem = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(str(step) for step in problem["loc"])
    return f"{where}: {problem['msg']}"
