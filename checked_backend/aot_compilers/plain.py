"""Compilers at AOT level: ``(gm, example_inputs) -> boxed callable``.

They serve as ``fw_compiler``, ``bw_compiler`` and ``inference_compiler`` of ``torch._dynamo``'s ``aot_autograd`` and of
``functorch.compile``'s ``aot_function`` and ``aot_module``.
"""

from __future__ import annotations

import copy
import itertools
import os
import sys
import threading
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx

from checked_backend._torch.modes import disable_current_modes
from checked_backend._torch.operators import OpOverload
from checked_backend._torch.settings import jit_autocast_off
from checked_backend.aot.boxed import AotCompiler, BoxedCallable, boxed, boxed_module
from checked_backend.aot_compilers.graph_kind import graph_kind
from checked_backend.dump import RegionDump
from checked_backend.dump.region import saved_activations
from checked_backend.errors import CandidateError, DumpError, DumpWarning
from checked_backend.report.dot import graph_to_dot, render_svg

_DOT_TIMEOUT_S = 120.0  # Graphviz's layout can take hours on a graph of many thousand nodes


def nop(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> BoxedCallable:
    """Run the graph as it is."""
    return boxed_module(gm)


def print_graph(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> BoxedCallable:
    """Write the graph's readable code to standard output, then run it as it is."""
    text = gm.print_readable(print_output=False)
    sys.stdout.write(text if text.endswith("\n") else text + "\n")
    return boxed_module(gm)


def draw_graph(name: str | os.PathLike[str]) -> AotCompiler:
    """A compiler that draws each graph it is given, then runs it as it is.

    Args:
        name: Folder for the drawings, made if it does not exist. The first graph is ``graph.dot``, the following
            ones are ``graph_1.dot``, ``graph_2.dot``, ...; each also as ``.svg`` if Graphviz's ``dot`` is installed.

    Returns:
        The compiler. If a drawing cannot be written, it warns, and the program goes on.

    Raises:
        DumpError: From the compiler, if the folder cannot be made.
    """
    folder = Path(name)
    indices = itertools.count()

    def draw(gm: fx.GraphModule, example_inputs: Sequence[Any], /) -> BoxedCallable:
        index = next(indices)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DumpError(f"cannot make the folder {folder}: {error}. Give draw_graph another one.") from error
        target = folder / ("graph.dot" if index == 0 else f"graph_{index}.dot")
        try:
            target.write_text(graph_to_dot(gm.graph, folder.name or "graph"), encoding="utf-8")
            render_svg(target, _DOT_TIMEOUT_S)
        except OSError as error:
            warnings.warn(f"{target} was not drawn, the program goes on: {error}", DumpWarning, stacklevel=2)
        return boxed_module(gm)

    return draw


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


def interpret(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> BoxedCallable:
    """Run the graph node by node in `torch.fx.Interpreter` instead of as generated code."""

    def run(args: list[Any]) -> Any:
        interpreter = fx.Interpreter(gm)
        interpreter.extra_traceback = False  # it would rewrite the exception that eager raises
        return interpreter.boxed_run(args)

    return boxed(run)


def torchscript(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> BoxedCallable:
    """Compile the graph with TorchScript, which torch has deprecated.

    Args:
        gm: An ATen graph from AOT autograd. TorchScript cannot take symbolic sizes.

    Returns:
        A boxed callable.

    Raises:
        CandidateError: This torch has no TorchScript, or TorchScript cannot express the graph.
    """
    if not callable(getattr(torch.jit, "script", None)):
        raise CandidateError(
            f"compiler 'torchscript': torch {torch.__version__} has no torch.jit.script. Use 'nop' or 'interpret' to "
            "run the graph as it is, or 'inductor' to compile it."
        )
    symbolic = [
        node.name
        for node in gm.graph.find_nodes(op="placeholder")
        if isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool))
    ]
    if symbolic:
        raise CandidateError(
            f"compiler 'torchscript': the graph has symbolic sizes ({', '.join(symbolic)}), which TorchScript cannot "
            "take. Compile with torch.compile(..., dynamic=False)."
        )
    try:
        scripted = _script(gm, example_inputs)
    except Exception as error:
        raise CandidateError(
            f"compiler 'torchscript': TorchScript rejected the graph: {type(error).__name__}: {error}\n"
            "TorchScript is deprecated and lacks many of today's operators. Use 'nop' or 'interpret' to run the graph "
            "as it is."
        ) from error

    def run(args: list[Any]) -> Any:
        values = tuple(args)
        args.clear()
        return scripted(*values)

    return boxed(run)


def _script(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
    graph = copy.deepcopy(gm.graph)
    for node, example in zip(graph.find_nodes(op="placeholder"), example_inputs, strict=False):
        if isinstance(example, (bool, int, float)):  # TorchScript takes everything else for a tensor
            node.type = type(example)
    for node in graph.nodes:
        # TorchScript resolves overloads itself, and knows devices by their names
        if isinstance(node.target, OpOverload):
            node.target = node.target.overloadpacket
        node.kwargs = fx.node.map_aggregate(node.kwargs, lambda arg: str(arg) if isinstance(arg, torch.device) else arg)
    # freezing computes constants, which must be real tensors, not fake ones
    with jit_autocast_off(), disable_current_modes(), warnings.catch_warnings():
        # the user chose a deprecated compiler, so its DeprecationWarning or FutureWarning says nothing new
        warnings.filterwarnings("ignore", message=r".*torch\.jit")
        # about torch's own nn.Module.__init__, which nobody here can change
        warnings.filterwarnings("ignore", message=r"The TorchScript type system", category=UserWarning)
        scripted = torch.jit.script(fx.GraphModule(gm, graph))
        return torch.jit.freeze(scripted.eval())
