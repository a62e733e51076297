"""Compilers that get one operator wrong, always or under some condition."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from tests.support.planting import (
    Compiler,
    interpreted,
    run_nodes,
    through_aot,
    through_aot_pair,
)
from tests.support.spoiling import (
    How,
    Spoil,
    changed,
)

__all__ = [
    "left_out",
    "refuses",
    "wrong_for_readers",
    "wrong_if_compiled_together",
    "wrong_if_fused",
    "wrong_if_symbolic",
    "wrong_if_unseen",
    "wrong_operator",
]


def wrong_operator(name: str, spoil: Spoil = changed, how: How = "python") -> Compiler:
    """Every call of an operator gives a spoiled result.

    Args:
        name: The operator, such as ``"aten.relu.default"``.
        spoil: Takes the right tensor, returns the wrong one.
        how: Whether the compiler is given the region's own graph, or AOT autograd's graphs, forward and backward.
    """
    return interpreted(lambda node, value: spoil(value) if str(node.target) == name else value, how)


def wrong_if_unseen(name: str, spoil: Spoil = changed) -> Compiler:
    """An operator gives a spoiled result, unless the graph returns it: as a wrong fusion does."""

    def result(node: fx.Node, value: Any) -> Any:
        seen = any(user.op == "output" for user in node.users)
        return spoil(value) if str(node.target) == name and not seen else value

    return interpreted(result, "aot")


def wrong_if_fused(name: str, spoil: Spoil = changed) -> Compiler:
    """An operator gives a spoiled result where its input was computed in the graph, and is not stored."""

    def result(node: fx.Node, value: Any) -> Any:
        computed = [source for source in node.all_input_nodes if source.op == "call_function"]
        fused = any(all(user.op != "output" for user in source.users) for source in computed)
        return spoil(value) if str(node.target) == name and fused else value

    return interpreted(result, "aot")


def wrong_if_symbolic(name: str, spoil: Spoil = changed) -> Compiler:
    """An operator gives a spoiled result in a graph that was compiled for any size."""

    def result(node: fx.Node, value: Any) -> Any:
        symbolic = any(isinstance(one.meta.get("val"), torch.SymInt) for one in node.graph.nodes)
        return spoil(value) if str(node.target) == name and symbolic else value

    return interpreted(result, "aot")


def wrong_for_readers(name: str, spoil: Spoil = changed, how: How = "aot") -> Compiler:
    """What an operator stores is right, and whatever else is compiled with it gets a spoiled value, as in a kernel."""

    class Runner(fx.Interpreter):
        def fetch_args_kwargs_from_env(self, n: fx.Node) -> Any:
            if n.op == "output" or "clone" in str(n.target):  # it is stored
                return super().fetch_args_kwargs_from_env(n)
            return tuple(fx.map_arg(given, lambda node: self._read(node)) for given in (n.args, n.kwargs))

        def _read(self, node: fx.Node) -> Any:
            value = self.env[node]
            return spoil(value) if str(node.target) == name else value

    def compiler(gm: fx.GraphModule, _example_inputs: Sequence[Any]) -> Callable[..., Any]:
        return Runner(gm).run

    return through_aot(compiler) if how == "aot" else compiler


def wrong_if_compiled_together(forward: str, backward: str, spoil: Spoil = changed) -> Compiler:
    """An operator of a backward graph is wrong if the forward graph compiled with it has another operator."""

    def compiler(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        together: list[fx.Node] = []

        def result(node: fx.Node, value: Any) -> Any:
            return spoil(value) if together and str(node.target) == backward else value

        def compile_forward(graph: fx.GraphModule, _inputs: Sequence[Any]) -> Callable[..., Any]:
            together.extend(node for node in graph.graph.nodes if str(node.target) == forward)
            return graph.forward

        return through_aot_pair(compile_forward, lambda graph, _inputs: run_nodes(graph, result))(gm, example_inputs)

    return compiler


def left_out(name: str, how: How = "aot") -> Compiler:
    """An operator is not executed: its first argument takes its place.

    Args:
        name: The operator.
        how: As for `wrong_operator`.
    """

    def compiler(gm: fx.GraphModule, _example_inputs: Sequence[Any]) -> Callable[..., Any]:
        for node in list(gm.graph.nodes):
            if str(node.target) == name:
                node.replace_all_uses_with(node.args[0])
                gm.graph.erase_node(node)
        gm.recompile()
        return gm.forward

    return compiler if how == "python" else through_aot(compiler)


def refuses(name: str) -> Compiler:
    """The compiler raises where it meets an operator."""

    def compiler(gm: fx.GraphModule, _example_inputs: Sequence[Any]) -> Callable[..., Any]:
        if any(str(node.target) == name for node in gm.graph.nodes):
            raise NotImplementedError(f"no lowering for {name}")
        return gm.forward

    return through_aot(compiler)
