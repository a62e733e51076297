"""Turn the tensors that a Dynamo graph holds as attributes and may write to into inputs.

``torch.compile(optimizer.step)`` gives such graphs: parameters and the optimizer's state are attributes. The reference
and the candidate would both write to them. As inputs, each run gets its own copy. The same goes for lists of tensors:
compiled autograd passes one list to its backward graphs, and a graph may write to the tensors in it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from checked_backend._torch.dynamo import element_source
from checked_backend._torch.operators import OpOverload
from checked_backend.graphs.effects import writes
from checked_backend.graphs.nodes import fetched, is_getitem

_WRITERS = frozenset({"delitem", "__setitem__", "__delitem__"})
_STATISTICS = ("batch_norm", "instance_norm")
_PURE_MODULES = ("torch", "math", "_operator", "operator", "builtins")


def lift_written_attributes(
    gm: fx.GraphModule, example_inputs: Sequence[Any]
) -> tuple[fx.GraphModule, Sequence[Any], tuple[torch.Tensor, ...]]:
    """Turn a graph's tensor attributes into inputs, if something in the graph writes in place.

    Args:
        gm: A Dynamo graph. It is not changed, because Dynamo goes on to use it.
        example_inputs: As Dynamo gave them.

    Returns:
        The graph to compile, its example inputs (with those of the new inputs at the end), and the tensors to pass for
        the new inputs. Nothing is added if the graph has no such attribute, or writes to nothing.
    """
    attributes = [node for node in gm.graph.find_nodes(op="get_attr") if isinstance(fetched(gm, node), torch.Tensor)]
    if not attributes or not any(_may_write(node) for node in gm.graph.nodes):
        return gm, example_inputs, ()
    held: dict[str, torch.Tensor] = {str(node.target): fetched(gm, node) for node in attributes}
    lifted = _copy_as_dynamo_made_it(gm)
    sources: dict[str, Any] = dict(getattr(gm, "_param_name_to_source", None) or {})
    lifted._param_name_to_source = {name: source for name, source in sources.items() if name not in held}  # type: ignore[assignment]
    added: dict[str, fx.Node] = {}
    for node in list(lifted.graph.find_nodes(op="get_attr")):
        name = str(node.target)
        if name not in held:
            continue
        if name not in added:
            added[name] = _placeholder(lifted.graph, node, sources.get(name))
        node.replace_all_uses_with(added[name])
        lifted.graph.erase_node(node)
    for name in held:
        _delete(lifted, name)
    lifted.recompile()
    examples = [node.meta.get("example_value", held[name]) for name, node in added.items()]
    return lifted, [*example_inputs, *examples], tuple(held[name] for name in added)


def _copy_as_dynamo_made_it(gm: fx.GraphModule) -> fx.GraphModule:
    """Copy a graph together with the sources of its inputs, which Dynamo stores on it for compilers."""
    copied = fx.GraphModule(gm, copy.deepcopy(gm.graph))
    copied.meta = gm.meta
    for name, value in vars(gm).items():
        vars(copied).setdefault(name, value)
    placeholders = (graph.find_nodes(op="placeholder") for graph in (gm.graph, copied.graph))
    for original, node in zip(*placeholders, strict=True):
        if hasattr(original, "_dynamo_source"):
            node._dynamo_source = original._dynamo_source
    return copied


def _placeholder(graph: fx.Graph, attribute: fx.Node, source: Any) -> fx.Node:
    """A placeholder after all others, in place of an attribute."""
    last = next((node for node in reversed(graph.nodes) if node.op == "placeholder"), None)
    first = next(iter(graph.nodes))
    with graph.inserting_before(first) if last is None else graph.inserting_after(last):
        made = graph.placeholder(attribute.name)
    made.meta = dict(attribute.meta)
    if source is not None:
        made._dynamo_source = source
    return made


def _delete(gm: fx.GraphModule, name: str) -> None:
    """Drop an attribute: AOT autograd takes all parameters of a graph as inputs."""
    path, _, own = name.rpartition(".")
    owner = gm.get_submodule(path) if path else gm
    if hasattr(owner, own):
        delattr(owner, own)


def _may_write(node: fx.Node) -> bool:
    """Whether a node may write to one of its arguments; True if that is unknown."""
    if writes(node) or node.op == "call_module":
        return True
    if node.op == "call_method":
        return node.target in _WRITERS or str(node.target).startswith("__i")
    if node.op != "call_function" or isinstance(node.target, OpOverload):
        return False
    name = str(getattr(node.target, "__name__", ""))
    if name in _WRITERS or name.endswith("_") or any(word in name for word in _STATISTICS):
        return True
    return str(getattr(node.target, "__module__", None) or "torch").partition(".")[0] not in _PURE_MODULES


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
        place
        for place, (node, example) in enumerate(zip(given, example_inputs, strict=True))
        if isinstance(example, (list, tuple))
        and all(is_getitem(user) and isinstance(user.args[1], int) for user in node.users)
    }
    if not places:
        return gm, example_inputs, None
    copied = _copy_as_dynamo_made_it(gm)
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
