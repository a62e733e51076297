"""A compiler that dumps the graphs it is given."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import fx

from checked_backend.aot.boxed import AotCompiler, BoxedCallable, boxed
from checked_backend.aot_compilers.graph_kind import graph_kind
from checked_backend.aot_compilers.plain import nop
from checked_backend.dump import RegionDump
from checked_backend.dump.region import saved_activations

__all__ = ["dump_graph"]


def dump_graph(folder: str | os.PathLike[str], name: str = "graph", *, values: bool = False) -> AotCompiler:
    """A compiler that dumps each graph it is given, then runs it as it is.

    Use the same compiler for forward and backward, so that a backward graph gets the index of its forward graph.

    Args:
        folder: The folder of the dumps; a graph becomes ``folder/name/name_{forward|backward|inference}_{index}``.
        name: The name of the graphs.
        values: Also save the values of the inputs of the first call.

    Returns:
        The compiler.

    Raises:
        DumpError: From the compiler, if the folder cannot be made.
    """
    waiting: list[tuple[frozenset[str], RegionDump]] = []
    lock = threading.Lock()

    def compile_graph(gm: fx.GraphModule, example_inputs: Sequence[Any], /) -> BoxedCallable:
        kind = graph_kind(gm)
        saved = frozenset(entry["name"] for entry in saved_activations(gm, kind))
        dump: RegionDump | None = None
        with lock:
            if kind == "backward":
                # the latest forward graph that saves these values, and has no backward graph yet
                place = next((i for i in reversed(range(len(waiting))) if waiting[i][0] == saved), None)
                dump = None if place is None else waiting.pop(place)[1]
            dump = dump or RegionDump.claim(Path(folder), name, values=values)
            if kind == "forward" and dump is not None:
                waiting.append((saved, dump))
        run = nop(gm, example_inputs)
        if dump is None:
            return run
        dump.write(kind, gm)
        return boxed(dump.watched(kind, run))

    return compile_graph
