"""The stage ladder: the steps from a region's graph to compiled code, each as a compiler that stops there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import fx

from checked_backend._torch.aot import aot_autograd
from checked_backend._torch.inductor import inductor_front
from checked_backend.aot.boxed import boxed, boxed_module
from checked_backend.aot.decompositions import decomposition_table
from checked_backend.aot.partition import partition_function
from checked_backend.diagnose.localize.subgraph import unshared
from checked_backend.graphs.nodes import outputs_of
from checked_backend.options import CheckOptions
from checked_backend.regions.compile import Compiler, copy_graph, inductor_patches

_STATEFUL_DRAWS = {"run_and_save_rng_state": 0, "run_with_rng_state": 1, "graphsafe_run_with_rng_state": 0}
"""Higher-order operators that draw, each with the place of the random operator among its arguments."""

GraphKind = Literal["dynamo", "forward", "backward", "inference"]


@dataclass(frozen=True, slots=True)
class Recorded:
    """A graph of a region, and the inputs of its first call, copied if the graph writes to them."""

    kind: GraphKind
    graph: fx.GraphModule
    inputs: tuple[Any, ...] = ()


@dataclass(slots=True)
class Capture:
    """Keeps the graphs of the first compilation it sees that are called, with the inputs of each one's first call."""

    recorded: list[Recorded] = field(default_factory=list)
    _seen: set[GraphKind] = field(default_factory=set)

    def compiler(self, kind: GraphKind) -> Callable[[fx.GraphModule, Sequence[Any]], Any]:
        """An AOT compiler that runs graphs as they are and keeps them."""
        return lambda gm, _example_inputs: self.keep(kind, gm)

    def keep(self, kind: GraphKind, gm: fx.GraphModule) -> Callable[[list[Any]], Any]:
        """Keep one graph. Returns a boxed callable that runs it."""
        run = boxed_module(gm)
        if kind in self._seen:
            return run  # a float64 twin, or another attempt
        self._seen.add(kind)
        graph = _traceable(gm)

        def recorded(args: list[Any]) -> Any:
            if not any(one.graph is graph for one in self.recorded):
                self.recorded.append(Recorded(kind, graph, tuple(unshared(graph, args))))
            with torch.no_grad():
                return run(args)

        return boxed(recorded)


@dataclass(frozen=True, slots=True)
class Stage:
    """A rung of the ladder.

    Attributes:
        name: ``aot``, ``decomposed`` or ``partitioned``.
        compiler: Makes its compiler, which keeps the graphs that it makes.
    """

    name: str
    what: str
    compiler: Callable[[Capture], Compiler]


def stages_of(options: CheckOptions, mode: str | None) -> tuple[Stage, ...]:
    """The ladder that leads to the code of a candidate, lowest rung first.

    For Inductor, the decompositions and the graph passes with the partition are rungs of their own. Any other compiler
    is opaque: its ladder has AOT autograd and its min-cut partition, which most compilers use.
    """
    first = Stage("aot", "AOT autograd", lambda capture: _aot(capture, "none", "default"))
    if options.compiler != "inductor":
        cut = Stage("partitioned", "AOT autograd's min-cut partition", lambda capture: _aot(capture, "none", "min_cut"))
        return first, cut
    front = partial(_inductor_front, inductor_patches(options, mode))
    return (
        first,
        Stage("decomposed", "Inductor's decompositions", lambda capture: _aot(capture, "inductor", "default")),
        Stage("partitioned", "Inductor's graph passes and partition", front),
    )


def _traceable(gm: fx.GraphModule) -> fx.GraphModule:
    """Copy a graph without what activation checkpointing left in it, which AOT autograd refuses to trace again.

    Random operators that keep or restore the generator's state become plain ones: what is drawn is not searched for.
    """
    copied = copy_graph(gm)
    for node in copied.graph.nodes:
        name = getattr(node.target, "__name__", "")
        if name in _STATEFUL_DRAWS:
            if name == "run_and_save_rng_state":
                _drop_state(copied.graph, node)
            operator, *given = node.args[_STATEFUL_DRAWS[name] :]
            node.target, node.args = operator, tuple(given)
            node.kwargs = {name: value for name, value in node.kwargs.items() if name != "rng_state"}
        node.meta.pop("recompute", None)
    copied.recompile()
    return copied


def _drop_state(graph: fx.Graph, node: fx.Node) -> None:
    """Return a drawn value only, in place of the generator's state and the value."""
    for item in list(node.users):
        if item.args[1]:
            node.meta = dict(item.meta)
            item.replace_all_uses_with(node)
        else:
            graph.output_node().args = (tuple(None if one is item else one for one in outputs_of(graph)),)
        graph.erase_node(item)


def _aot(
    capture: Capture, decompositions: Literal["none", "inductor"], partition: Literal["default", "min_cut"]
) -> Compiler:
    def compile_region(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        backend = aot_autograd(
            fw_compiler=capture.compiler("forward"),
            bw_compiler=capture.compiler("backward"),
            inference_compiler=capture.compiler("inference"),
            partition_fn=partition_function(partition),
            decompositions=decomposition_table(decompositions),
            keep_inference_input_mutations=True,
        )
        compiled: Callable[..., Any] = backend(gm, list(example_inputs))
        return compiled

    return compile_region


def _inductor_front(patches: dict[str, Any], capture: Capture) -> Compiler:
    def inner(gm: fx.GraphModule, _example_inputs: Sequence[Any], **how: Any) -> Any:
        forward: GraphKind = "inference" if how.get("is_inference") else "forward"
        return capture.keep("backward" if how.get("is_backward") else forward, gm)

    return lambda gm, example_inputs: inductor_front(gm, example_inputs, inner, patches)
