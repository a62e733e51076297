"""Cut a Dynamo graph at its collectives: what it receives from other ranks are inputs, what it sends are results.

The graph that is left exchanges nothing, so that any process can compile it and run it, without any other rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from checked_backend._torch.collectives import is_distributed_tensor
from checked_backend.ranks.collectives import Role, exchanges_anything, node_role

_ONE_SIDED = ("isend", "irecv")


@dataclass(frozen=True, slots=True)
class CutGraph:
    """A graph without its collectives.

    Attributes:
        graph: The graph. Its last inputs are what it receives, its last results what it sends, in this order.
        names: The exchanges as findings call them, in this order: ``all_reduce_0``.
        received: The recorded values of the added inputs.
    """

    graph: fx.GraphModule
    names: tuple[str, ...]
    received: tuple[torch.Tensor, ...]


def cut_collectives(gm: fx.GraphModule) -> CutGraph | str:
    """Cut a graph.

    Args:
        gm: A copy of a Dynamo graph; it is changed.

    Returns:
        The graph that is left; or the reason why it cannot be cut.
    """
    reason = _uncuttable(gm)
    if reason:
        return reason
    names: list[str] = []
    sent: list[fx.Node] = []
    received: list[torch.Tensor] = []
    for node, role, operands in _collectives(gm):
        if role is not Role.COLLECTIVE:  # a wait, for one result or for a list, or a wrapper: what is received is there
            if not _replaced(gm, node, operands, many=isinstance(node.args[0], (list, tuple))):
                return f"what {node.name} waits for is used as a whole list"
            continue
        values = node.meta.get("example_value")
        given = values if isinstance(values, (list, tuple)) else (values,)
        results = [value for value in given if isinstance(value, torch.Tensor)]
        if len(results) != len(operands):
            return f"what {node.name} receives is not known before it runs"
        inputs = []
        for operand, value, name in zip(operands, results, _names(node, len(operands), names), strict=True):
            inputs.append(_input(gm, f"received_{name}", value))
            sent.append(_copied(gm, node, operand))
            received.append(inputs[-1].meta["example_value"])
            names.append(name)
        if not _replaced(gm, node, inputs, many=isinstance(values, (list, tuple))):
            return f"what {node.name} receives is used as a whole list"
    [output] = gm.graph.find_nodes(op="output")
    output.args = ((*output.args[0], *sent),)
    gm.graph.lint()
    gm.recompile()
    return CutGraph(gm, tuple(names), tuple(received))


def with_sent_aliases(gm: fx.GraphModule) -> fx.GraphModule:
    """Have a graph return what it sends too, as tensors through which gradients come from the other ranks alone.

    Args:
        gm: A copy of a Dynamo graph that `cut_collectives` can cut; it is changed.
    """
    aliases = []
    for node, role, operands in _collectives(gm):
        for operand in operands if role is Role.COLLECTIVE else ():
            with gm.graph.inserting_before(node):
                alias = gm.graph.call_method("view_as", (operand, operand))
            aliases.append(alias)
            node.args = tuple(_exchanged(arg, operand, alias) for arg in node.args)
    [output] = gm.graph.find_nodes(op="output")
    output.args = ((*output.args[0], *aliases),)
    gm.recompile()
    return gm


def _exchanged(arg: Any, operand: fx.Node, alias: fx.Node) -> Any:
    if isinstance(arg, (list, tuple)):
        return [alias if one is operand else one for one in arg]
    return alias if arg is operand else arg


def _uncuttable(gm: fx.GraphModule) -> str:
    for module in gm.modules():
        for node in module.graph.nodes if isinstance(module, fx.GraphModule) else ():
            if is_distributed_tensor(node.meta.get("example_value")):
                return "it computes with distributed tensors, whose operators may exchange anything"
            if not exchanges_anything(node):
                continue
            if module is not gm:
                return f"{node.name} is in the body of another operator"
            known = node_role(node)
            if known is None or known.role is Role.OPAQUE or known.family in _ONE_SIDED:
                return f"{node.name} ({node.target}) is no exchange whose results are its own"
            if known.in_place:
                return f"{node.name} ({node.target}) writes what it receives to a given tensor"
    return ""


def _collectives(gm: fx.GraphModule) -> Iterator[tuple[fx.Node, Role, Sequence[fx.Node]]]:
    for node in list(gm.graph.nodes):
        if exchanges_anything(node) and (known := node_role(node)) is not None:
            yield node, known.role, _operands(node)


def _operands(node: fx.Node) -> Sequence[fx.Node]:
    first = node.args[0] if node.args else None
    many: Any = first if isinstance(first, (list, tuple)) else (first,)
    return [one for one in many if isinstance(one, fx.Node)]


def _names(node: fx.Node, count: int, before: Sequence[str]) -> list[str]:
    known = node_role(node)
    family = "" if known is None else known.family
    seen = Counter(name.rpartition("_")[0] for name in before)
    return [f"{family}_{seen[family] + place}" for place in range(count)]


def _input(gm: fx.GraphModule, name: str, value: torch.Tensor) -> fx.Node:
    inputs = gm.graph.find_nodes(op="placeholder")
    with gm.graph.inserting_after(inputs[-1]) if inputs else gm.graph.inserting_before(next(iter(gm.graph.nodes))):
        made = gm.graph.placeholder(name)
    made.meta["example_value"] = value.detach().requires_grad_(value.requires_grad)
    return made


def _copied(gm: fx.GraphModule, node: fx.Node, operand: fx.Node) -> fx.Node:
    """What a collective sends, as it is then: the program may write to it later."""
    with gm.graph.inserting_before(node):
        copy = gm.graph.call_method("clone", (operand,))
    value: Any = operand.meta.get("example_value")
    copy.meta = {"example_value": value.detach().requires_grad_(value.requires_grad)}
    if "stack_trace" in node.meta:
        copy.meta["stack_trace"] = node.meta["stack_trace"]
    return copy


def _replaced(gm: fx.GraphModule, node: fx.Node, inputs: Sequence[fx.Node], *, many: bool) -> bool:
    """Give what is received to those that read it. Return whether all of them could be given it."""
    if not many:
        node.replace_all_uses_with(inputs[0])
    for user in list(node.users):
        if getattr(user.target, "__name__", "") != "getitem":
            return False
        user.replace_all_uses_with(inputs[user.args[1]])  # type: ignore[index]
        gm.graph.erase_node(user)
    gm.graph.erase_node(node)
    return True
