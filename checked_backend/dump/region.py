"""Dump the graphs of one region while it is compiled, and their inputs when they are first called.

The folders are ``DIR/NAME/NAME_{kind}_{INDEX}/``, numbered without shared state and written atomically. A dump that
fails must not end the user's program. It warns, and the program goes on.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import json
import logging
import os
import platform
import re
import shutil
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx

from checked_backend._torch.dynamo import dynamo_restarts
from checked_backend._torch.modes import disable_current_modes
from checked_backend._torch.symbols import tensor_bytes
from checked_backend.dump.encode import (
    EncodedGraph,
    GraphInput,
    describe_inputs,
    encode_graph,
    graph_inputs,
)
from checked_backend.dump.load import with_checksum
from checked_backend.dump.module import module_source, repro_source
from checked_backend.errors import DumpError, DumpWarning
from checked_backend.findings.paths import shown_path
from checked_backend.graphs.nodes import recorded_value
from checked_backend.graphs.source_line import source_line
from checked_backend.random_state import random_untouched
from checked_backend.report.clean import listed
from checked_backend.report.dot import graph_to_dot, render_svg
from checked_backend.report.progress import say
from checked_backend.report.write import write_whole

log = logging.getLogger(__name__)

_SVG_NODES, _SVG_SECONDS = 2000, 10.0
_CLAIMS = ".claims"
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG)


def claim_index(root: Path, name: str) -> tuple[Path, str, int]:
    """Claim the next free index of a region's name, also against other threads and processes: its folder, name, index.

    Characters that do not belong in a file name become ``_``. A DumpError is raised if the folder cannot be made.
    """
    safe = re.sub(r"[^A-Za-z0-9.-]+", "_", name).strip("._") or "graph"
    folder = root / safe
    claims = folder / _CLAIMS
    try:
        claims.mkdir(parents=True, exist_ok=True)
        taken = re.compile(re.escape(safe) + r"_[a-z]+_(\d+)")
        index = 1 + max(
            (int(found[1]) for path in folder.iterdir() if (found := taken.fullmatch(path.name))), default=-1
        )
        while True:
            with suppress(FileExistsError):
                # exclusive creation makes the claim; it lasts, because forward and backward come at different times
                os.close(os.open(claims / str(index), os.O_CREAT | os.O_EXCL | os.O_WRONLY))
                return folder, safe, index
            index += 1
    except OSError as error:
        raise DumpError(
            f"cannot make the dump folder {folder}: {error}. Set the option dump to another folder."
        ) from error


@dataclass(frozen=True, slots=True)
class _Pending:
    """A graph whose inputs are not known yet. ``facts`` are what ``inputs.json`` says of the graph."""

    folder: Path
    inputs: list[GraphInput]
    facts: dict[str, Any]


class RegionDump:
    """The dump of one region: its graphs share an index of one name. With ``values``, those of the inputs are saved."""

    def __init__(self, folder: Path, name: str, index: int, *, values: bool) -> None:
        self._folder = folder
        self._name = name
        self._index = index
        self._values = values
        self._pending: dict[str, _Pending] = {}
        self._written: dict[str, str] = {}
        self._lock = threading.Lock()  # a region may be called from several threads

    @classmethod
    def claim(cls, root: Path, name: str, *, values: bool) -> RegionDump | None:
        """Claim the next index of a name; each rank of a distributed program has its own names.

        None, after a warning, if the disk is full; a DumpError if the folder cannot be made for another reason.
        """
        rank, world = _rank()
        try:
            return cls(*claim_index(root, f"{name}.rank{rank}" if world > 1 else name), values=values)
        except DumpError as error:
            if isinstance(error.__cause__, OSError) and error.__cause__.errno in _NO_ROOM:
                _warn(error)
                return None
            raise

    def path(self, kind: str) -> Path:
        """Folder of the graph of this kind."""
        return self._folder / f"{self._name}_{kind}_{self._index}"

    def place(self, kind: str, fill: Callable[[Path], None]) -> Path:
        """Have a graph's folder filled, and rename it into place, so that no reader sees half of it.

        Raises:
            DumpError: The folder cannot be written.
        """
        target = self.path(kind)
        try:
            temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=self._folder))
            try:
                fill(temporary)
                temporary.chmod(0o755)  # mkdtemp makes folders that only the owner can read
                os.rename(temporary, target)
            except BaseException:
                shutil.rmtree(temporary, ignore_errors=True)
                raise
        except OSError as error:
            raise DumpError(
                f"cannot write the dump {target}: {error}. Set the option dump to another folder."
            ) from error
        return target

    def _discard(self) -> None:
        """Remove the graphs of this index, and free the index. Files that cannot be removed stay."""
        for path in self._folder.glob(f"{self._name}_*_{self._index}"):
            shutil.rmtree(path, ignore_errors=True)
        with suppress(OSError):
            (self._folder / _CLAIMS / str(self._index)).unlink()

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """Enter this while the region is compiled. If Dynamo traces the graph anew in another form, no dump is left."""
        try:
            yield
        except dynamo_restarts():
            self._discard()
            raise
        written = [kind for kind in self._written if self.path(kind).exists()]
        if written:
            first, others = shown_path(str(self.path(written[0]))), listed(written[1:])
            more = f", and beside it {others}" if others else ""
            say(log, f"checked-backend: wrote the graph {first}{more} (checked-backend show {first})")

    def write(self, kind: str, gm: fx.GraphModule) -> None:
        """Write a graph, with the facts known about its inputs so far. A failure is a warning."""
        text = str(gm.graph)
        if self.path(kind).exists():
            # AOT autograd compiles a backward again if its first compilation failed; the graph is then written already
            if self._written.get(kind) != text:
                _warn(DumpError(f"{self.path(kind)} is there already, with another graph of this region"))
            return
        self._written[kind] = text
        try:
            with _real_tensors():
                encoded = encode_graph(gm)
                facts = {"symbols": encoded.symbols, "relations": encoded.relations}
                pending = _Pending(self.path(kind), graph_inputs(gm), facts)
                self.place(kind, lambda target: self._fill(target, kind, gm, encoded, pending))
                self._pending[kind] = pending
        except Exception as error:  # see the module's docstring
            _warn(error)

    def watched(self, kind: str, function: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
        """A boxed callable that records its inputs at its first call."""

        @functools.wraps(function)
        def watch(args: list[Any]) -> Any:
            if self._pending:
                self.observe(kind, args)
            return function(args)

        return watch

    def observe(self, kind: str, args: Sequence[Any]) -> None:
        """Complete ``inputs.json`` with the arguments of a graph's call, before it runs. Only the first call counts."""
        with self._lock:
            pending, joint = self._pending.pop(kind, None), None
            if pending is not None and kind == "forward":
                joint = self._pending.pop("joint", None)
        if pending is None:
            return
        try:
            with _real_tensors():
                self._complete(pending, args)
                if joint is not None:  # its tangents are not known before the backward
                    known = {name: value for (name, *_), value in zip(pending.inputs, args, strict=False)}
                    self._complete(joint, [known.get(name, traced) for name, _, traced in joint.inputs])
        except Exception as error:  # see the module's docstring
            _warn(error, f"the inputs of {pending.folder} were not recorded")

    def _complete(self, pending: _Pending, args: Sequence[Any]) -> None:
        document, table = describe_inputs(pending.inputs, args)
        values = "inputs.safetensors" if self._values else None
        if values is not None:
            try:
                document["storages"] = table.save(pending.folder / values)
            except BaseException:
                (pending.folder / values).unlink(missing_ok=True)
                raise
        # this file says whether the other one is valid, so replacing it completes the dump
        content = _json(with_checksum({**document, **pending.facts, "values": values}))
        write_whole(content, pending.folder / "inputs.json")

    def _fill(self, target: Path, kind: str, gm: fx.GraphModule, encoded: EncodedGraph, pending: _Pending) -> None:
        title, (rank, world) = pending.folder.name, _rank()
        storages = encoded.constants.storages()
        if storages:
            storages = encoded.constants.save(target / "constants.safetensors")
        texts = {
            "module.py": module_source(gm, encoded, title, torch.__version__),
            "repro.py": repro_source(encoded),
            "graph.dot": graph_to_dot(gm.graph, title),
        }
        data = {name: text.encode("utf-8", "backslashreplace") for name, text in texts.items()}
        for name, content in data.items():
            (target / name).write_bytes(content)
        if sum(1 for _ in gm.graph.nodes) <= _SVG_NODES:
            render_svg(target / "graph.dot", _SVG_SECONDS)
        graph = with_checksum(
            {
                "name": self._name,
                "kind": kind,
                "index": self._index,
                "torch": torch.__version__,
                "python": platform.python_version(),
                "process": os.getpid(),
                "rank": rank,
                "world_size": world,
                "graph": encoded.graph,
                "storages": storages,
                "stacks": list(encoded.stacks),
                **pending.facts,
                "pairs": self._pairs(kind),
                "saved": saved_activations(gm, kind),
                "requires": list(encoded.requires),
                "unsupported": list(encoded.unsupported),
                "files": {name: hashlib.sha256(content).hexdigest() for name, content in data.items()},
            }
        )
        pending.facts["graph"] = graph["checksum"]
        document, _ = describe_inputs(pending.inputs, None)
        (target / "inputs.json").write_bytes(_json(with_checksum({**document, **pending.facts, "values": None})))
        (target / "graph.json").write_bytes(_json(graph))  # last: without it a folder is no dump

    def _pairs(self, kind: str) -> dict[str, str]:
        others = {"forward": ("joint", "backward"), "backward": ("joint", "forward"), "joint": ("forward", "backward")}
        found = list(others.get(kind, ()))
        if kind != "dynamo" and self.path("dynamo").exists():
            found.append("dynamo")
        return {other: self.path(other).name for other in found}


def saved_activations(gm: fx.GraphModule, kind: str) -> list[dict[str, Any]]:
    """The values that a forward graph saves for its backward, or a backward graph takes from it, with bytes."""
    if kind == "forward":
        (output,) = gm.graph.find_nodes(op="output")
        leaves = output.args[0] if isinstance(output.args[0], (tuple, list)) else [output.args[0]]
        descriptions = output.meta.get("desc") or ()
        nodes = [
            node
            for node, description in zip(leaves, descriptions, strict=False)
            if isinstance(node, fx.Node) and type(description).__name__.startswith("SavedForBackwards")
        ]
    elif kind == "backward":
        nodes = [node for node in gm.graph.find_nodes(op="placeholder") if not node.name.startswith("tangents_")]
    else:
        nodes = []
    return [
        {"name": node.name, "source": source_line(node), "bytes": tensor_bytes(recorded_value(node))}
        for node in dict.fromkeys(nodes)
    ]


@contextmanager
def _real_tensors() -> Iterator[None]:
    """Leave the modes of the compilation, which make tensors fake, and record nothing for autograd.

    The program's random state is not changed.
    """
    with disable_current_modes(), random_untouched():
        yield


def _json(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document, indent=1, allow_nan=False).encode("ascii")


def _rank() -> tuple[int, int]:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    rank, world = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    return (int(rank), int(world)) if rank.isdecimal() and world.isdecimal() else (0, 1)


def _warn(error: Exception, what: str = "a graph was not dumped") -> None:
    why = str(error) if isinstance(error, DumpError) else f"{type(error).__name__}: {error}"
    warnings.warn(f"{what}, the program goes on: {why}", DumpWarning, stacklevel=3)
