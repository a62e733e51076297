"""A compiler that leaves the calls of one source line to eager, as ``torch.compiler.disable`` on them would."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx
from torch.fx.passes.split_module import split_module

from checked_backend.graphs.source_line import source_line
from checked_backend.regions.compile import Compiler, compile_candidate, copy_graph

__all__ = ["without_line"]

_BEFORE, _THE_LINE, _BEHIND = 0, 1, 2


def without_line(compiler: Compiler, source: str) -> Compiler:
    """Compile the calls before a line and the calls after it, each part by itself.

    Args:
        source: The line, in the form of `source_line`.
    """

    def compile_region(gm: fx.GraphModule, _example_inputs: Sequence[Any]) -> Callable[..., Any]:
        parts = _parts(gm, source)
        if _THE_LINE not in parts.values():
            raise LookupError(f"the region has no call from {source}")
        copied = copy_graph(gm)
        split: Any = split_module(copied, copied, lambda node: parts[node.name], keep_original_order=True)
        for part in (_BEFORE, _BEHIND):
            inner = getattr(split, f"submod_{part}", None)
            if inner is not None:
                inner.forward = _compiled_at_first_call(compiler, inner)
        function: Callable[..., Any] = split.forward
        return function

    return compile_region


def _compiled_at_first_call(compiler: Compiler, part: fx.GraphModule) -> Callable[..., Any]:
    """Compile a part for the inputs of its first call. Compilers expect a graph that returns a tuple."""
    graph = copy_graph(part)
    output = graph.graph.output_node()
    single = not isinstance(output.args[0], (tuple, list))
    if single:
        output.args = ((output.args[0],),)
        graph.recompile()
    made: list[Callable[..., Any]] = []

    def run(*args: Any) -> Any:
        if not made:
            with warnings.catch_warnings():
                # AOT autograd looks at the .grad of the inputs, which are no leaves here
                warnings.simplefilter("ignore")
                made.append(compile_candidate(compiler, graph, list(args)))
        results = made[0](*args)
        return results[0] if single else results

    return run


def _parts(gm: fx.GraphModule, source: str) -> dict[str, int]:
    calls = [node for node in gm.graph.nodes if node.op.startswith("call_")]
    places = [place for place, node in enumerate(calls) if source_line(node) == source]
    first, last = (min(places), max(places)) if places else (len(calls), len(calls))
    parts = {}
    for place, node in enumerate(calls):
        parts[node.name] = _BEFORE if place < first else _THE_LINE if place <= last else _BEHIND
    return parts
