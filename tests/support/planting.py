"""How the wrong compilers of `faults` are made: run a region, or its AOT graphs, and edit what comes out."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._guards import TracingContext

__all__ = [
    "Compiler",
    "Edit",
    "MutatedInputs",
    "SpoilGradient",
    "compiled_by_aot",
    "input_position",
    "interpreted",
    "run_in_python",
    "run_nodes",
    "through_aot",
    "through_aot_pair",
]

Compiler = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]

Edit = Callable[[list[Any], Sequence[Any]], Any]
"""Gets what a graph returned, as a list, and its inputs; gives back what the spoiled graph returns."""

MakeEdit = Callable[[fx.GraphModule], Edit]
"""Gets the Dynamo graph, for its names, when the graph to spoil is compiled."""


def input_position(gm: fx.GraphModule, name: str) -> int:
    """Which placeholder of a Dynamo graph is the input of this name.

    Args:
        gm: The graph.
        name: The end of the user's name, such as ``"x"`` or ``"layers.0.weight"``.

    Raises:
        LookupError: No placeholder, or more than one, fits.
    """
    names = _placeholders(gm)
    steps = r"(?:_modules|_parameters|_buffers)*_".join(re.escape(step) for step in name.lower().split("."))
    fitting = [place for place, found in enumerate(names) if re.search(rf"(?:^|_){steps}_?$", found.lower())]
    if len(fitting) != 1:
        raise LookupError(f"{len(fitting)} inputs are called {name!r}; there are {', '.join(names)}")
    return fitting[0]


def _placeholders(gm: fx.GraphModule) -> tuple[str, ...]:
    return tuple(node.name for node in gm.graph.nodes if node.op == "placeholder")


class MutatedInputs:
    """Which inputs' new values an AOT forward graph returns, before its outputs."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, ...], tuple[int, ...]] = {}

    def of(self, gm: fx.GraphModule) -> tuple[int, ...]:
        """Positions of those inputs, for the Dynamo graph that AOT autograd is compiling or has compiled before."""
        names = _placeholders(gm)
        context = TracingContext.try_get()
        if context is not None:  # there is none when a region is compiled again outside of Dynamo
            metadata: Any = context.fw_metadata
            self._known[names] = tuple(metadata.mutated_inp_runtime_indices)
        return self._known[names]


class SpoilGradient(torch.autograd.Function):
    """The identity, with a spoiled gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, spoil: Callable[[torch.Tensor], Any]) -> torch.Tensor:
        ctx.spoil = spoil
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, None]:
        return ctx.spoil(gradient), None


def run_in_python(make_edit: MakeEdit) -> Compiler:
    """A compiler that runs the region as it is and edits its results."""

    def compiler(gm: fx.GraphModule, _example_inputs: Sequence[Any]) -> Callable[..., Any]:
        edit = make_edit(gm)
        return lambda *args: edit(list(gm.forward(*args)), args)

    return compiler


def interpreted(result: Callable[[fx.Node, Any], Any], how: Literal["python", "aot"]) -> Compiler:
    """A compiler that runs graphs node by node.

    Args:
        result: Gets each node and its value; gives back the value that it has instead.
        how: Whether it runs the region's own graph, or AOT autograd's graphs.
    """

    def compiler(gm: fx.GraphModule, _example_inputs: Sequence[Any]) -> Callable[..., Any]:
        return run_nodes(gm, result)

    return compiler if how == "python" else through_aot(compiler)


def run_nodes(gm: fx.GraphModule, result: Callable[[fx.Node, Any], Any]) -> Callable[..., Any]:
    """A graph as a function that runs node by node; the arguments are those of `interpreted`."""

    class Runner(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            return result(n, super().run_node(n))

    return Runner(gm).run


def through_aot(compiler: Compiler) -> Compiler:
    """A compiler of AOT autograd's graphs as a compiler of regions."""
    return through_aot_pair(compiler, compiler)


def through_aot_pair(forward: Compiler, backward: Compiler) -> Compiler:
    """Compilers of AOT autograd's forward (or inference) graphs and backward graphs as a compiler of regions."""

    def boxed(compiler: Compiler) -> Compiler:
        return lambda gm, inputs: _boxed(compiler(gm, inputs), None)

    compile_forward, compile_backward = boxed(forward), boxed(backward)
    return lambda gm, inputs: aot_autograd(
        fw_compiler=compile_forward, bw_compiler=compile_backward, inference_compiler=compile_forward
    )(gm, inputs)


def compiled_by_aot(
    forward: MakeEdit | None = None,
    backward: MakeEdit | None = None,
    around: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None,
) -> Compiler:
    """AOT autograd with compilers that run the graphs and edit their results.

    Args:
        forward: Makes the edit of the forward (or inference) graph.
        backward: Makes the edit of the backward graph.
        around: Wraps the function that runs the forward graph.
    """

    def compiler(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        def compile_forward(graph: fx.GraphModule, _inputs: Sequence[Any]) -> Callable[..., Any]:
            run = graph.forward if around is None else around(graph.forward)
            return _boxed(run, None if forward is None else forward(gm))

        def compile_backward(graph: fx.GraphModule, _inputs: Sequence[Any]) -> Callable[..., Any]:
            return _boxed(graph.forward, None if backward is None else backward(gm))

        return aot_autograd(
            fw_compiler=compile_forward, bw_compiler=compile_backward, inference_compiler=compile_forward
        )(gm, example_inputs)

    return compiler


def _boxed(run: Callable[..., Any], edit: Edit | None) -> Callable[..., Any]:
    def boxed(inputs: list[Any]) -> Any:
        args = tuple(inputs)
        inputs.clear()
        results = run(*args)
        return results if edit is None else edit(list(results), args)

    boxed._boxed_call = True  # type: ignore[attr-defined]
    return boxed
