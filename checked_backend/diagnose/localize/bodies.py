"""Look inside control flow: the bodies of a higher-order operator, and the inputs of their calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from checked_backend._torch.operators import HigherOrderOperator
from checked_backend._torch.tensors import middle_lane
from checked_backend.diagnose.localize.subgraph import unshared
from checked_backend.graphs.nodes import graph_fetched
from checked_backend.regions.compile import eager_graph
from checked_backend.regions.inputs import copy_values
from checked_backend.regions.torch_state import modes_restored

BodyCall = tuple[fx.GraphModule, tuple[Any, ...]]
"""A graph, and the inputs that it is called with."""


def is_higher_order(node: fx.Node) -> bool:
    """Whether a node calls graphs: ``cond``, ``while_loop``, ``invoke_subgraph``."""
    return isinstance(node.target, HigherOrderOperator) and bool(_bodies(node))


def called_bodies(gm: fx.GraphModule, inputs: Sequence[Any], node: fx.Node) -> list[BodyCall]:
    """The bodies that a higher-order operator calls in eager, with the inputs of the first and the last call of each.

    A body that is called under vmap, as ``flex_attention`` calls it, gets the values of one element.

    Returns:
        The bodies that are called, each with its inputs, in the order of the operator's inputs.
    """
    own = eager_graph(gm)  # there a checkpoint calls its body as Python
    follower = fx.Interpreter(own)
    given = iter(unshared(gm, inputs))
    calls: dict[str, list[BodyCall]] = {}
    with torch.no_grad(), modes_restored():
        for one in own.graph.nodes:
            if one.name == node.name:
                _note_calls(own, gm, node, calls)
            follower.env[one] = next(given) if one.op == "placeholder" else follower.run_node(one)
            if one.name == node.name:
                break
    return [call for made in calls.values() for call in made]


def _note_calls(own: fx.GraphModule, original: fx.GraphModule, node: fx.Node, calls: dict[str, list[BodyCall]]) -> None:
    for source in _bodies(node):
        path = str(source.target)
        body, kept = own.get_submodule(path), original.get_submodule(path)
        if isinstance(body, fx.GraphModule) and isinstance(kept, fx.GraphModule):
            body.forward = _noting(body.forward, kept, calls.setdefault(path, []))


def _noting(run: Callable[..., Any], body: fx.GraphModule, calls: list[BodyCall]) -> Callable[..., Any]:
    def forward(*args: Any) -> Any:
        del calls[1:]  # loops may be long: only the first and the last call are kept
        calls.append((body, tuple(copy_values([middle_lane(arg) for arg in args]))))
        return run(*args)

    return forward


def _bodies(node: fx.Node) -> list[fx.Node]:
    home = node.graph.owning_module
    if home is None:
        return []
    return [source for source in node.all_input_nodes if graph_fetched(home, source) is not None]
