"""Replace a region's inputs that are lists of tensors by one input for each tensor.

Compiled autograd passes one list to its backward graphs, and a graph may write to the tensors in it. The reference and
the candidate would both add to the same ``.grad``. As separate inputs, each run gets its own tensors.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from checked_backend._torch.dynamo import element_source
from checked_backend.graphs.lift import copy_as_dynamo_made_it

__all__ = ["spread_lists"]


def spread_lists(
    gm: fx.GraphModule, example_inputs: Sequence[Any]
) -> tuple[fx.GraphModule, Sequence[Any], Callable[[Sequence[Any]], Sequence[Any]] | None]:
    """Replace a graph's list inputs by one input for each element.

    Args:
        gm: A Dynamo graph. It is not changed, because Dynamo goes on to use it.
        example_inputs: As Dynamo gave them.

    Returns:
        The graph to compile, its example inputs, and a function that turns the arguments that Dynamo passes into the
        graph's arguments (None if they are the same). A list that the graph uses as a whole stays a list.
    """
    given = gm.graph.find_nodes(op="placeholder")
    places = {
        place: len(example)
        for place, (node, example) in enumerate(zip(given, example_inputs, strict=True))
        if isinstance(example, (list, tuple)) and all(map(_takes_an_element, node.users))
    }
    if not places:
        return gm, example_inputs, None
    copied = copy_as_dynamo_made_it(gm)
    examples: list[Any] = []
    for place, (node, example) in enumerate(
        zip(copied.graph.find_nodes(op="placeholder"), example_inputs, strict=True)
    ):
        examples += _spread(copied.graph, node, example) if place in places else [example]
    copied.recompile()

    def spread(args: Sequence[Any]) -> Sequence[Any]:
        flat: list[Any] = []
        for place, arg in enumerate(args):
            flat += arg if place in places else [arg]
        return flat

    return copied, examples, spread


def _takes_an_element(user: fx.Node) -> bool:
    return user.op == "call_function" and user.target is operator.getitem and isinstance(user.args[1], int)


def _spread(graph: fx.Graph, node: fx.Node, example: Sequence[Any]) -> list[Any]:
    """Replace a placeholder by one for each element, and return an example of each."""
    takers: dict[int, list[fx.Node]] = {}
    for user in node.users:
        takers.setdefault(int(user.args[1]) % len(example), []).append(user)  # type: ignore[arg-type]
    examples = []
    last = node
    for index, value in enumerate(example):
        with graph.inserting_after(last):
            last = graph.placeholder(f"{node.name}_{index}")
        if hasattr(node, "_dynamo_source"):
            last._dynamo_source = element_source(node._dynamo_source, index)
        users = takers.get(index, [])
        last.meta = dict(users[0].meta) if users else {"example_value": value}
        examples.append(last.meta.get("example_value", value))
        for user in users:
            user.replace_all_uses_with(last)
            graph.erase_node(user)
    graph.erase_node(node)
    return examples
