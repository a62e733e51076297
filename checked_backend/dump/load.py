"""Read a dump. Loading runs no code of it: no pickle, no eval, no import of its ``module.py``.

Its files are read without trust: each has a checksum, and limits.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import stat
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import torch
from pydantic import BaseModel, TypeAdapter
from safetensors import SafetensorError, safe_open
from torch import fx

from checked_backend.dump.rebuild import BadGraph, check_graph, rebuild_graph
from checked_backend.dump.schema import FORMAT, VERSION, Graph, GraphFile, InputsFile, Storage, Tensor
from checked_backend.dump.standalone import ambient, build_inputs, build_tensors
from checked_backend.dump.targets import Trusted, provides_nothing
from checked_backend.errors import CheckedBackendError, DumpError
from checked_backend.numerics.bits import memory_of
from checked_backend.process.memory import whole_memory
from checked_backend.report.clean import clean
from checked_backend.report.codec import validated

_MAX_JSON = 64 << 20
_MAX_TEXT = 256 << 20
_MAX_VALUES = 2_000_000
_MAX_HEADER = 4096
_MAX_PER_STORAGE = 256
_BLOCK = 1 << 20
_ModelT = TypeVar("_ModelT", bound=BaseModel)


def with_checksum(document: Mapping[str, Any]) -> dict[str, Any]:
    """The document with its format, version and checksum."""
    full = {"format": FORMAT, "version": VERSION, **document}
    return {**full, "checksum": _checksum(full)}


def read_json(path: Path, model: type[_ModelT]) -> _ModelT:
    """Read and validate a JSON file of a dump.

    Raises:
        DumpError: The file is missing, truncated, edited, of another version of the format, or does not fit the model.
    """
    with _opened(path, _MAX_JSON) as stream:
        data = stream.read(_MAX_JSON + 1)
    if len(data) > _MAX_JSON:  # the file has grown meanwhile
        raise DumpError(f"{path}: larger than {_MAX_JSON >> 20} MiB")
    # before it is parsed, for the smallest value takes 28 times its text
    values = sum(data.count(mark) for mark in (b",", b"[", b"{"))
    if values > _MAX_VALUES:
        raise DumpError(f"{path}: has {values:,} values, more than the {_MAX_VALUES:,} that a graph may have")
    try:
        document = json.loads(data, parse_constant=_finite, parse_float=_finite)
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
    wanted = {f"storage_{i}": storage for i, storage in enumerate(storages) if storage.checksum is not None}
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
        if zlib.crc32(memory_of(data)) != storage.checksum:
            raise DumpError(f"{path}: the contents of {name} are not those that were dumped")
    return found


def _checksum(document: Mapping[str, Any]) -> str:
    text = json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:60]} is no number here")
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


def _check_header(path: Path, storages: int, size: int) -> None:
    """Refuse a safetensors file whose header or contents are larger than the storages need."""
    with _opened(path, 1 << 62) as stream:
        there = os.fstat(stream.fileno()).st_size
        header = int.from_bytes(stream.read(8), "little")
    if header > _MAX_HEADER + _MAX_PER_STORAGE * storages:
        raise DumpError(f"{path}: not a safetensors file of {storages} storages: its header has {header:,} bytes")
    if there != 8 + header + size:
        raise DumpError(f"{path}: truncated, or holds other storages than those recorded")


_GRAPH, _INPUTS, _CONSTANTS = "graph.json", "inputs.json", "constants.safetensors"


@dataclass(eq=False, repr=False)
class Dump:
    """A graph that was dumped, in the folder ``path``."""

    path: Path
    _graph: GraphFile
    _inputs: InputsFile
    _constants: dict[str, torch.Tensor]
    _trusted: Trusted

    @property
    def metadata(self) -> dict[str, Any]:
        """The contents of ``graph.json`` as plain values, with those of ``inputs.json`` under ``inputs``."""
        return {**self._graph.model_dump(), "inputs": self._inputs.model_dump()}

    @property
    def kind(self) -> str:
        """The graph kind: dynamo, joint, forward, backward or inference."""
        return self._graph.kind

    @property
    def title(self) -> str:
        """NAME_KIND_INDEX."""
        return f"{self._graph.name}_{self._graph.kind}_{self._graph.index}"

    @property
    def has_values(self) -> bool:
        """Whether the dump has the real input values."""
        return self._inputs.values is not None

    @cached_property
    def module(self) -> fx.GraphModule:
        """The graph, ready to be called with `inputs`. Its operators must be registered here.

        Raises:
            DumpError: It holds something that a dump cannot hold, or an operator that is not registered here.
        """
        return self.build()

    def build(self) -> fx.GraphModule:
        """The graph anew, with constants of its own; it raises as `module` does."""
        if self._graph.unsupported:
            why = clean("; ".join(self._graph.unsupported))
            raise DumpError(f"{self.path / _GRAPH}: this graph cannot be run from its dump: {why}")
        named = dict(_all_constants(self._graph.graph, ""))
        specs = [spec.model_dump() for spec in named.values()]
        storages = [storage.model_dump() for storage in self._graph.storages]
        check_memory(self.path / _GRAPH, _host_bytes(self._graph.storages))
        try:
            constants = dict(zip(named, build_tensors(specs, storages, self._constants), strict=True))
            return rebuild_graph(self._graph.graph, constants, self._graph.stacks, self._trusted)
        except (BadGraph, LookupError, RuntimeError, TypeError, ValueError, SyntaxError) as error:
            needs = clean(", ".join(name for name in self._graph.requires if not provides_nothing(name)))
            needs = f". The dump says that it needs: {needs}" if needs else ""
            raise DumpError(f"{self.path / _GRAPH}: {error}{needs}") from None

    def inputs(self, seed: int = 0) -> list[Any]:
        """Fresh inputs: the recorded values if they were saved, else values within the recorded ranges.

        Args:
            seed: For values that were not saved.

        Raises:
            DumpError: An input cannot be made here: another kind of device, more memory than there is, or a value
                that a dump cannot hold.
        """
        check_memory(self.path / _INPUTS, _host_bytes(self._inputs.storages))
        saved = read_regions(self.path / self._inputs.values, self._inputs.storages) if self._inputs.values else {}
        try:
            return build_inputs(self._inputs.model_dump(), saved, seed)
        except (RuntimeError, ValueError, MemoryError, AssertionError, OverflowError, ImportError) as error:
            raise DumpError(f"{self.path / _INPUTS}: the inputs cannot be made here: {error}") from error

    @contextmanager
    def ambient(self) -> Iterator[None]:
        """The modes (grad, inference, autocast) and the random state that the graph was called under.

        Raises:
            DumpError: They belong to a device or a version of torch that is not here.
        """
        with ExitStack() as stack:
            try:
                stack.enter_context(ambient(self._inputs.model_dump()))
            except (RuntimeError, TypeError, ValueError, AssertionError) as error:
                where = self.path / _INPUTS
                raise DumpError(f"{where}: the recorded modes or random state do not fit here: {error}") from error
            yield


_PROGRAMS = "graph.json is run here, and no program: run repro.py to try an edit, or dump the graph again."


def load_dump(path: str | Path, *, imported: Collection[str] = (), registered: Collection[str] | None = None) -> Dump:
    """Read a dump's folder. No code of the dump runs.

    Args:
        path: The folder of one graph.
        imported: Modules that you have imported and trust: the graph may call the functions that they define.
        registered: Operators, as ``namespace::name``, that were registered while these modules were imported. Besides
            torch's operators, the graph may only call these. Default: all that this program registered.

    Raises:
        DumpError: A file is missing, truncated, edited, of a newer format, or holds something that a dump may not
            hold. The message says which file and why.
    """
    trusted = Trusted(frozenset(imported), None if registered is None else frozenset(registered))
    folder = Path(path)
    if not folder.is_dir():
        raise DumpError(f"{folder}: not a folder. Name the folder of one graph: DIR/NAME/NAME_forward_0.")
    if not (folder / _GRAPH).exists():
        nested = sorted(found.parent.relative_to(folder) for found in folder.glob(f"*/{_GRAPH}"))
        nested += sorted(found.parent.relative_to(folder) for found in folder.glob(f"*/*/{_GRAPH}"))
        listed = f" Folders in it that are: {', '.join(map(str, nested[:10]))}." if nested else ""
        raise DumpError(f"{folder / _GRAPH}: missing, so {folder} is not the dump of a graph.{listed}")
    graph = read_json(folder / _GRAPH, GraphFile)
    for name, checksum in graph.files.items():
        check_text(folder / name, checksum, _PROGRAMS if name.endswith(".py") else "Dump the graph again.")
    try:
        check_graph(graph.graph, runs=not graph.unsupported)
    except (BadGraph, RecursionError) as error:
        raise DumpError(f"{folder / _GRAPH}: {error}") from None
    inputs = read_json(folder / _INPUTS, InputsFile)
    if inputs.graph != graph.checksum:
        raise DumpError(f"{folder / _INPUTS}: belongs to another dump than {_GRAPH}")
    _check_storages(folder / _GRAPH, [spec for _, spec in _all_constants(graph.graph, "")], graph.storages)
    _check_storages(folder / _INPUTS, [entry.tensor for entry in inputs.inputs if entry.tensor], inputs.storages)
    placeholders = [node.name for node in graph.graph.nodes if node.op == "placeholder"]
    if placeholders != [entry.name for entry in inputs.inputs]:
        raise DumpError(f"{folder / _INPUTS}: other inputs than the graph's")
    constants = read_regions(folder / _CONSTANTS, graph.storages) if graph.storages else {}
    if inputs.values is not None:
        read_regions(folder / inputs.values, inputs.storages)
    return Dump(folder, graph, inputs, constants, trusted)


def _all_constants(graph: Graph, path: str) -> Iterator[tuple[str, Tensor]]:
    for name, spec in graph.constants.items():
        yield f"{path}{name}", spec
    for name, child in graph.subgraphs.items():
        yield from _all_constants(child, f"{path}{name}.")


def _host_bytes(storages: list[Storage]) -> int:
    return sum(storage.end for storage in storages if storage.device == "cpu")


def _check_storages(file: Path, tensors: list[Tensor], storages: list[Storage]) -> None:
    for spec in tensors:
        if spec.storage >= len(storages) or spec.end() > storages[spec.storage].end:
            raise DumpError(f"{file}: a tensor reaches beyond its storage")
        if spec.device != storages[spec.storage].device:
            raise DumpError(f"{file}: a tensor is on another device than its storage")
