"""The AOT-level compilers of this package, as ``checked_backend.aot_compilers``.

They serve as ``fw_compiler``, ``bw_compiler`` and ``inference_compiler`` of ``torch._dynamo``'s ``aot_autograd`` and of
``functorch.compile``'s ``aot_function`` and ``aot_module``.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import fx

from checked_backend.aot import draw_graph, interpret, nop, print_graph, torchscript
from checked_backend.aot.boxed import AotCompiler, BoxedCallable, boxed
from checked_backend.dump import RegionDump
from checked_backend.dump.region import saved_activations

__all__ = ["draw_graph", "dump_graph", "interpret", "nop", "print_graph", "torchscript"]


def dump_graph(folder: str | os.PathLike[str], name: str = "graph", *, values: bool = False) -> AotCompiler:
    """A compiler that dumps each graph it is given, then runs it as it is.

    Hand the same compiler to forward and backward: a backward graph gets the index of its forward graph.

    Args:
        folder: Where dumps go; a graph becomes ``folder/name/name_{forward|backward|inference}_{index}``.
        name: What the graphs are called.
        values: Also save the values of the inputs of the first call.

    Returns:
        The compiler.

    Raises:
        DumpError: From the compiler, if the folder cannot be made.
    """
    waiting: list[tuple[frozenset[str], RegionDump]] = []
    lock = threading.Lock()

    def compile_graph(gm: fx.GraphModule, example_inputs: Sequence[Any], /) -> BoxedCallable:
        kind = _kind(gm)
        saved = frozenset(entry["name"] for entry in saved_activations(gm, kind))
        dump: RegionDump | None = None
        with lock:
            if kind == "backward":
                dump = next((forward for kept, forward in waiting if kept == saved), None)
            dump = dump or RegionDump.claim(Path(folder), name, values=values)
            if kind == "forward" and dump is not None:
                waiting.append((saved, dump))
        run = nop(gm, example_inputs)
        if dump is None:
            return run
        dump.write(kind, gm)
        return boxed(dump.watched(kind, run))

    return compile_graph


def _kind(gm: fx.GraphModule) -> str:
    if any(node.name.startswith("tangents_") for node in gm.graph.find_nodes(op="placeholder")):
        return "backward"
    return "forward" if saved_activations(gm, "forward") else "inference"
