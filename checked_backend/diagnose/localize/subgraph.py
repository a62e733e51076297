"""Make graphs out of parts of a graph.

Dynamo writes modes (autocast, inference mode, flags of kernels) as calls between the others. A part of a graph gets
the modes of its own calls, entered and left inside the part.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from checked_backend._torch.modes import enter_autocast, exit_autocast
from checked_backend._torch.operators import OpOverload
from checked_backend._torch.symbols import tensor_bytes
from checked_backend.graphs.effects import has_effects, mode_name, sets_mode, writes
from checked_backend.graphs.nodes import is_getitem, recorded_value
from checked_backend.regions.compile import copy_graph
from checked_backend.regions.inputs import copy_values, storage_key
from checked_backend.regions.torch_state import TorchState

Finish = Callable[[fx.Graph, Sequence[fx.Node]], Iterable[fx.Node]]
"""Makes what a part returns out of the part's own nodes."""

_CALLS = ("call_function", "call_method", "call_module")


def calls_of(gm: fx.GraphModule) -> list[fx.Node]:
    """The nodes that compute something, in order, without those that set a mode."""
    return [node for node in gm.graph.nodes if node.op in _CALLS and not sets_mode(node)]


def can_be_walked(gm: fx.GraphModule) -> bool:
    """Whether a Dynamo graph can be taken apart.

    It may only write to an input, or to an intermediate value that no other node reads and that shares its memory with
    no other node (``relu(x, inplace=True)``).
    """
    owners: Counter[int | None] = Counter()
    for node in gm.graph.nodes:
        value = recorded_value(node)
        if isinstance(value, torch.Tensor) and not has_effects(node):
            owners[storage_key(value)] += 1
    return not any(_entangled(node, owners) for node in calls_of(gm))


def _entangled(node: fx.Node, owners: Mapping[int | None, int]) -> bool:
    if node.op == "call_module":
        return True
    if not has_effects(node):
        return False
    written = node.args[0] if node.args else None
    if not isinstance(written, fx.Node) or "out" in node.kwargs:
        return True
    if written.op == "placeholder":
        return False
    value = recorded_value(written)
    later = any(user is not node for user in written.users)
    return later or not isinstance(value, torch.Tensor) or owners[storage_key(value)] != 1


def unshared(gm: fx.GraphModule, inputs: Sequence[Any]) -> list[Any]:
    """Inputs on which a graph may be run: themselves if it has ATen's operators that write to nothing, else copies."""
    harmless = all((isinstance(node.target, OpOverload) and not writes(node)) or is_item(node) for node in calls_of(gm))
    return [*inputs] if harmless else copy_values(inputs)


def is_symbolic(gm: fx.GraphModule) -> bool:
    """Whether a graph was traced for sizes that vary."""
    return any(
        isinstance(size, torch.SymInt)
        for node in gm.graph.find_nodes(op="placeholder")
        for value in [recorded_value(node)]
        for size in (value.shape if isinstance(value, torch.Tensor) else [value])
    )


def called_name(node: fx.Node) -> str:
    """A node's operator for people: ``aten.relu.default``, ``torch.nn.functional.relu``, ``Tensor.transpose``."""
    if node.op == "call_method":
        return f"Tensor.{node.target}"
    if isinstance(node.target, OpOverload):
        return str(node.target)
    return str(node._pretty_print_target(node.target))


def tensors_made(node: fx.Node) -> list[fx.Node]:
    """The nodes for the tensors that a call makes: the call itself, or the items taken from its tuple."""
    if is_item(node):
        return []
    if isinstance(recorded_value(node), torch.Tensor):
        return [node]
    return [user for user in node.users if is_item(user) and isinstance(recorded_value(user), torch.Tensor)]


def is_item(node: fx.Node) -> bool:
    """Whether a node takes one item of a tuple."""
    if not is_getitem(node):
        return False
    source = node.args[0]
    return isinstance(source, fx.Node) and not isinstance(recorded_value(source), torch.Tensor)


def maker_of(node: fx.Node) -> fx.Node:
    """The call that makes a tensor; for an item of a tuple, the call that returns the tuple."""
    while is_item(node):
        node = node.args[0]  # type: ignore[assignment]
    return node


def sources_through(node: fx.Node, through: Callable[[fx.Node], bool]) -> list[fx.Node]:
    """What a node's inputs are made from, the inputs themselves included, as far back as there is a way through."""
    seen: dict[fx.Node, None] = {}
    pending = list(reversed(node.all_input_nodes))
    while pending:
        source = pending.pop()
        if source not in seen:
            seen[source] = None
            pending.extend(reversed(source.all_input_nodes) if through(source) else ())
    return list(seen)


def is_view(node: fx.Node) -> bool:
    """Whether an ATen operator returns its input's memory, and changes nothing in it."""
    return isinstance(node.target, OpOverload) and is_view_operator(node.target)


def is_view_operator(target: OpOverload) -> bool:
    """Whether an operator returns its input's memory, and changes nothing in it."""
    returned = [item.alias_info for item in target._schema.returns]
    return bool(returned) and all(alias is not None and not alias.is_write for alias in returned)


def bytes_of(node: fx.Node) -> int:
    """Bytes of the tensor that a node stands for, 0 if it is none."""
    return tensor_bytes(recorded_value(node)) or 0


def self_contained(gm: fx.GraphModule, ambient: TorchState, *, gradients: bool = False) -> fx.GraphModule:
    """Copy a Dynamo graph so that it computes the same wherever it is called, gradients aside.

    Args:
        ambient: The modes that it was called under. Autocast becomes part of the graph.
        gradients: Whether the copy will be differentiated. If not, it sets no grad mode.
    """
    copied = copy_graph(gm)
    for node in [] if gradients else reversed(list(copied.graph.nodes)):
        if mode_name(node) == "_set_grad_enabled" and not node.users:
            copied.graph.erase_node(node)
    first = next(node for node in copied.graph.nodes if node.op != "placeholder")
    for device, dtype in ambient.autocast.items():
        with copied.graph.inserting_before(first):
            entered = copied.graph.call_function(enter_autocast, (device, dtype, True, False))
        with copied.graph.inserting_before(copied.graph.output_node()):
            copied.graph.call_function(exit_autocast, (entered,))
    copied.recompile()
    return copied


def part_of(
    gm: fx.GraphModule,
    nodes: Collection[fx.Node],
    returned: Sequence[fx.Node],
    *,
    finish: Finish | None = None,
) -> tuple[fx.GraphModule, list[fx.Node]]:
    """Make a graph of some calls of another graph, which returns the values of some of them.

    Returns:
        The part, whose calls run under the same modes as in the whole graph, and the nodes of the graph whose values
        are the part's inputs.
    """
    graph = fx.Graph()
    copied: dict[fx.Node, fx.Node] = {}
    chosen = set(nodes)
    modes = _modes_of(gm, chosen)
    needed = {source for node in chosen for source in node.all_input_nodes if source.op != "get_attr"} - chosen
    sizes = _sizes([node for node in gm.graph.nodes if node in needed])
    inputs = [node for node in gm.graph.nodes if node in needed and node not in sizes]
    for node in inputs:
        name = node.target if node.op == "placeholder" else node.name
        copied[node] = graph.placeholder(str(name))
        copied[node].meta = dict(node.meta)
    for node, (tensor, place) in sizes.items():
        copied[node] = graph.call_function(torch.ops.aten.sym_size.int, (copied[tensor], place))
        copied[node].meta = dict(node.meta)
    for node in gm.graph.nodes:
        if node in chosen or node in modes or (node.op == "get_attr" and any(user in chosen for user in node.users)):
            copied[node] = graph.node_copy(node, lambda source: copied[source])
    results = [copied[node] for node in returned]
    graph.output(tuple(results if finish is None else finish(graph, results)))
    return fx.GraphModule(gm, graph), inputs


def _modes_of(gm: fx.GraphModule, chosen: Collection[fx.Node]) -> set[fx.Node]:
    """The calls that set the modes under which chosen calls run, and leave them; flags end as in the whole graph."""
    entered: list[fx.Node] = []
    flags: dict[object, fx.Node] = {}
    needed: dict[fx.Node, None] = {}
    for node in gm.graph.nodes:
        name = mode_name(node)
        if name.startswith("_enter_"):
            entered.append(node)
        elif name.startswith("_exit_"):
            entered = [one for one in entered if one not in node.args]
        elif name:
            flags[node.target] = node
        elif node in chosen:
            needed.update(dict.fromkeys([*entered, *flags.values()]))
    if any(node in needed for node in flags.values()):
        needed.update(dict.fromkeys(flags.values()))
    first = next((node for node in needed if mode_name(node) == "_set_grad_enabled"), None)
    if first is not None and first.args == (True,):  # parts are differentiated with grad mode on
        del needed[first]
    return {*needed, *(user for node in needed for user in node.users if mode_name(user).startswith("_exit_"))}


def _sizes(nodes: Collection[fx.Node]) -> dict[fx.Node, tuple[fx.Node, int]]:
    """Numbers that are a size of a tensor, each with that tensor: given apart, a compiler would not know it."""
    found: dict[Any, tuple[fx.Node, int]] = {}
    for node in nodes:
        value = recorded_value(node)
        for place, size in enumerate(value.shape if isinstance(value, torch.Tensor) else ()):
            found.setdefault(getattr(getattr(size, "node", None), "expr", None), (node, place))
    numbers = {node: recorded_value(node) for node in nodes}
    return {
        node: found[value.node.expr]
        for node, value in numbers.items()
        if isinstance(value, torch.SymInt) and value.node.expr in found
    }
