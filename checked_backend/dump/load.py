"""Read a dump. Loading runs no code of it: no pickle, no eval, no import of its ``module.py``."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import fx

from checked_backend.dump.files import check_memory, check_text, read_json, read_regions
from checked_backend.dump.rebuild import BadGraph, check_graph, rebuild_graph
from checked_backend.dump.schema import Graph, GraphFile, InputsFile, Storage, Tensor
from checked_backend.dump.standalone import ambient, build_inputs, build_tensors
from checked_backend.dump.targets import Trusted, provides_nothing
from checked_backend.errors import DumpError
from checked_backend.report.clean import clean

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
        try:
            return rebuild_graph(self._graph.graph, self._built_constants(), self._graph.stacks, self._trusted)
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

    def _built_constants(self) -> dict[str, torch.Tensor]:
        named = dict(_all_constants(self._graph.graph, ""))
        specs = [spec.model_dump() for spec in named.values()]
        check_memory(self.path / _GRAPH, _host_bytes(self._graph.storages))
        storages = [storage.model_dump() for storage in self._graph.storages]
        return dict(zip(named, build_tensors(specs, storages, self._constants), strict=True))


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
