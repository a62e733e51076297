"""Turn the tensors that a Dynamo graph holds as attributes and may write to into inputs.

``torch.compile(optimizer.step)`` gives such graphs: parameters and the optimizer's state are attributes. The reference
and the candidate would both write to them. As inputs, each run gets its own copy.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from checked_backend._torch.operators import OpOverload
from checked_backend.graphs.effects import writes

__all__ = ["copy_as_dynamo_made_it", "lift_written_attributes"]

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
    attributes = [node for node in gm.graph.find_nodes(op="get_attr") if isinstance(_held(gm, node), torch.Tensor)]
    if not attributes or not any(_may_write(node) for node in gm.graph.nodes):
        return gm, example_inputs, ()
    held: dict[str, torch.Tensor] = {str(node.target): _held(gm, node) for node in attributes}
    lifted = copy_as_dynamo_made_it(gm)
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


def copy_as_dynamo_made_it(gm: fx.GraphModule) -> fx.GraphModule:
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


def _held(gm: fx.GraphModule, node: fx.Node) -> Any:
    value: Any = gm
    for step in str(node.target).split("."):
        value = getattr(value, step, None)
    return value


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
