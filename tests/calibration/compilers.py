"""Candidates: compilers that put a buggy program in the place of the right one, and compilers that round otherwise."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch._inductor.compile_fx  # the decompositions of max_pool2d need it loaded
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.registry import lookup_backend
from torch._inductor.decomposition import select_decomp_table

from checked_backend.regions.compile import copy_graph
from checked_backend.regions.float64_twin import float64_graph

from .rounding import VARIANTS, Rounding

Compiler = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]

_NUMBER = re.compile(r"tensors_(\d+)_")


def candidate(name: str) -> Compiler:
    """A compiler by name: a variant of rounding, ``eager``, or a Dynamo backend."""
    if name in VARIANTS:
        return partial(_emulate, VARIANTS[name])
    if name == "eager":
        return lambda gm, _example_inputs: gm.forward
    if name == "inductor":
        inductor = lookup_backend("inductor")
        return lambda gm, inputs: inductor(gm, list(inputs), config_patches={"fallback_random": True})  # type: ignore[call-arg]
    return lookup_backend(name)


def _emulate(knobs: dict[str, bool], gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """Lower as Inductor does, with its decompositions, and run the ATen graphs with other roundings than eager's."""

    def compile_graph(graph: fx.GraphModule, _inputs: Sequence[Any]) -> Callable[..., Any]:
        def run(args: list[Any]) -> Any:
            return Rounding(graph, **knobs).boxed_run(args)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    with torch._inductor.config.patch(fallback_random=True):  # Inductor's own random operators are no rounding
        table = select_decomp_table()
    backend = aot_autograd(
        fw_compiler=compile_graph, bw_compiler=compile_graph, inference_compiler=compile_graph, decompositions=table
    )
    compiled: Callable[..., Any] = backend(gm, example_inputs)
    return compiled


@dataclass(frozen=True)
class Trace:
    """A program's Dynamo graph.

    Attributes:
        gm: The graph.
        order: For each placeholder, the number of the program's tensor.
    """

    gm: fx.GraphModule
    order: tuple[int, ...]


def trace(program: Callable[..., Any], tensors: Sequence[Any]) -> Trace:
    traces: list[Trace] = []

    def keep(gm: fx.GraphModule, _example_inputs: Sequence[Any]) -> Callable[..., Any]:
        traces.append(Trace(gm, _order(gm)))
        return gm.forward

    torch._dynamo.reset()
    try:
        torch.compile(program, backend=keep, dynamic=False, fullgraph=True)(*tensors)
    finally:
        torch._dynamo.reset()
    return traces[0]


def planted(wrong: Trace, inner: Compiler) -> Compiler:
    """A compiler that compiles another program than the one it is given.

    For inputs in float64 (the float64 twin) it compiles the wrong program in float64, as a wrong compiler would.
    """

    def compile_wrong(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        given = {number: place for place, number in enumerate(_order(gm))}
        places = [given[number] for number in wrong.order]
        inputs = [example_inputs[place] for place in places]
        graph = float64_graph(wrong.gm) if _has(inputs, torch.float64) else copy_graph(wrong.gm)
        compiled = inner(graph, inputs)

        return lambda *args: compiled(*(args[place] for place in places))

    return compile_wrong


def _has(values: Sequence[Any], dtype: torch.dtype) -> bool:
    return any(isinstance(value, torch.Tensor) and value.dtype == dtype for value in values)


def _order(gm: fx.GraphModule) -> tuple[int, ...]:
    names = [str(node.target) for node in gm.graph.nodes if node.op == "placeholder"]
    found = [_NUMBER.search(name) for name in names]
    if not all(found):
        raise ValueError(f"placeholders {names} do not say which tensor they are")
    return tuple(int(match[1]) for match in found if match)
