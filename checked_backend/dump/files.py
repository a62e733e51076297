"""The files of a dump as bytes: checksums, and reading without trust."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import torch
from pydantic import BaseModel, TypeAdapter
from safetensors import SafetensorError, safe_open

from checked_backend.dump.schema import FORMAT, VERSION, Storage
from checked_backend.dump.tensors import fingerprint
from checked_backend.errors import CheckedBackendError, DumpError
from checked_backend.process.memory import whole_memory
from checked_backend.report.codec import validated

_MAX_JSON = 64 << 20
_MAX_TEXT = 256 << 20
_MAX_VALUES = 2_000_000
_MAX_HEADER = 4096
_MAX_PER_STORAGE = 256
_BLOCK = 1 << 20
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
        DumpError: The file is missing, truncated, edited, of another version of the format, or does not fit the model.
    """
    data = _read(path, _MAX_JSON)
    _check_values(path, data)
    try:
        document = json.loads(data, parse_constant=_no_constant, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise DumpError(f"{path}: not JSON, or truncated: {error}") from None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise DumpError(f"{path}: not a file of a dump: 'format' is not {FORMAT!r}")
    version = document.get("version")
    if type(version) is not int or version != VERSION:
        raise DumpError(f"{path}: of version {version!r}; this package reads version {VERSION}. Dump the graph again.")
    found = document.pop("checksum", None)
    try:
        expected = _checksum(document)
    except RecursionError:
        raise DumpError(f"{path}: nested too deeply") from None
    if found != expected:
        raise DumpError(f"{path}: the checksum does not fit: the file was edited or damaged. Dump the graph again.")
    try:
        return validated(TypeAdapter(model), {**document, "checksum": found}, path.stem)
    except CheckedBackendError as error:
        raise DumpError(f"{path}: {error}") from None


def check_text(path: Path, expected: str, advice: str) -> None:
    """Check a text file whose checksum is known, without keeping its text.

    Raises:
        DumpError: The file is missing, too large, or not the file that was written.
    """
    digest = hashlib.sha256()
    with _opened(path, _MAX_TEXT) as stream:
        while block := stream.read(_BLOCK):
            digest.update(block)
    if digest.hexdigest() != expected:
        raise DumpError(f"{path}: not the file that was dumped: edited, truncated or damaged. {advice}")


def check_memory(path: Path, needed: int) -> None:
    """Refuse a file whose tensors need more than this machine's memory, before any memory is requested.

    An operating system that overcommits memory would kill the process later.
    """
    there = whole_memory()
    if there is not None and needed > there:
        raise DumpError(
            f"{path}: its tensors need {needed / 2**30:,.1f} GiB; this machine has {there / 2**30:,.1f} GiB"
        )


def read_regions(path: Path, storages: Sequence[Storage]) -> dict[str, torch.Tensor]:
    """Read the bytes of storages from a safetensors file.

    Raises:
        DumpError: A storage is missing, of another size, or has other contents than were written.
    """
    wanted = {f"storage_{i}": storage for i, storage in enumerate(storages) if storage.fingerprint is not None}
    check_memory(path, sum(storage.end - storage.start for storage in wanted.values()))
    _check_header(path, len(wanted), sum(storage.end - storage.start for storage in wanted.values()))
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


@contextmanager
def _opened(path: Path, limit: int) -> Iterator[BinaryIO]:
    """Open a file that is no link and no larger than a limit. The names in a dump must not lead out of its folder."""
    try:
        # follow no link, and do not wait for a pipe that nobody writes to
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ELOOP, errno.EMLINK, errno.ENXIO):
            raise DumpError(f"{path}: missing, or not a regular file") from None
        raise DumpError(f"{path}: cannot be read: {error.strerror or error}") from None
    facts = os.fstat(descriptor)
    if path.is_symlink() or not stat.S_ISREG(facts.st_mode):
        os.close(descriptor)
        raise DumpError(f"{path}: missing, or not a regular file")
    with os.fdopen(descriptor, "rb") as stream:
        if facts.st_size > limit:
            raise DumpError(f"{path}: larger than {limit >> 20} MiB")
        yield stream


def _read(path: Path, limit: int) -> bytes:
    with _opened(path, limit) as stream:
        data = stream.read(limit + 1)  # the file may grow meanwhile
    if len(data) > limit:
        raise DumpError(f"{path}: larger than {limit >> 20} MiB")
    return data


def _check_values(path: Path, data: bytes) -> None:
    """Refuse a JSON text of very many values before it is parsed: the smallest value takes 28 times its text."""
    values = sum(data.count(mark) for mark in (b",", b"[", b"{"))
    if values > _MAX_VALUES:
        raise DumpError(f"{path}: has {values:,} values, more than the {_MAX_VALUES:,} that a graph may have")


def _check_header(path: Path, storages: int, size: int) -> None:
    """Refuse a safetensors file whose header or contents are larger than the storages need."""
    with _opened(path, 1 << 62) as stream:
        there = os.fstat(stream.fileno()).st_size
        header = int.from_bytes(stream.read(8), "little")
    if header > _MAX_HEADER + _MAX_PER_STORAGE * storages:
        raise DumpError(f"{path}: not a safetensors file of {storages} storages: its header has {header:,} bytes")
    if there != 8 + header + size:
        raise DumpError(f"{path}: truncated, or holds other storages than those recorded")
