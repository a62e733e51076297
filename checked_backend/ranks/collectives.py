"""What operators exchange with other ranks, and a Dynamo graph that is cut there.

What a cut graph receives from other ranks are inputs, what it sends are results. It exchanges nothing, so that any
process can compile it and run it, without any other rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from checked_backend._torch.collectives import is_distributed_tensor, own_rank
from checked_backend._torch.operators import OpOverload
from checked_backend.graphs.operators import Operator, argument
from checked_backend.graphs.source_line import source_line

_FUNCTIONAL = frozenset({"_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "_dtensor"})
_OPAQUE = frozenset({"c10d", "symm_mem"})
_HARMLESS = frozenset({"_wrap_tensor_autograd", "check_for_nan"})
_ONE_SIDED = ("isend", "irecv")
_MODULES = "torch.distributed"


class Role(Enum):
    """The part that an operator plays in a program of several ranks."""

    NONE = auto()
    """It exchanges nothing."""
    COLLECTIVE = auto()
    """It begins an exchange whose inputs and results are its own."""
    WAIT = auto()
    """It waits for the result of an exchange."""
    OPAQUE = auto()
    """It exchanges something that cannot be seen from outside."""


def role_of(func: OpOverload, operator: Operator) -> Role:
    """The part that an operator plays in a program of several ranks."""
    return _role(func.namespace, operator.base)


def _role(home: str, base: str) -> Role:
    if home not in _FUNCTIONAL | _OPAQUE or base in _HARMLESS:
        return Role.NONE
    if base in ("wait_tensor", "wait_tensors"):
        return Role.WAIT
    return Role.OPAQUE if home in _OPAQUE or _family(base) not in _TERMS else Role.COLLECTIVE


_TERMS = MappingProxyType(
    {
        "all_reduce": ("reduce_op", "reduceOp", "group_name", "ranks"),
        "all_gather": ("group_name", "ranks"),
        "reduce_scatter": ("reduce_op", "reduceOp", "group_name", "ranks"),
        "broadcast": ("src", "group_name", "ranks"),
        "all_to_all": ("output_split_sizes", "input_split_sizes", "group_name", "ranks"),
        "shard_dim_alltoall": ("gather_dim", "shard_dim", "group_name"),
        "isend": ("dst", "tag", "group_name"),
        "irecv": ("src", "tag", "group_name"),
    }
)
_REDUCTIONS = ("reduce_op", "reduceOp")
_INPUTS = ("input", "inputs", "self", "shard", "tensor")


def _family(base: str) -> str:
    """The kind of a collective, the same whether it writes in place, to a given result, or takes several tensors."""
    name = base.removesuffix("_out").removesuffix("_").removesuffix("_coalesced")
    return {
        "all_gather_into_tensor": "all_gather",
        "reduce_scatter_tensor": "reduce_scatter",
        "all_to_all_single": "all_to_all",
    }.get(name, name)


@dataclass(frozen=True, slots=True)
class Collective:
    """One call of a collective.

    Attributes:
        family: ``all_reduce``, ``all_gather``, ...
        terms: The parameters on which all ranks must agree, by name: the reduction, the group, ...
        inputs: The tensors that it sends; for ``irecv`` the tensor that it receives into.
        in_place: Whether results are written to the inputs.
        out: The tensor that the result is written to, if one is given.
        many: Whether it takes a list of tensors.
    """

    family: str
    terms: tuple[tuple[str, Any], ...]
    inputs: tuple[torch.Tensor, ...]
    in_place: bool
    out: torch.Tensor | None
    many: bool

    def sends_here(self) -> bool:
        """Whether the values of its inputs reach another rank when this rank calls it."""
        if self.family == "irecv":
            return False
        if self.family != "broadcast":
            return True
        own = own_rank(dict(self.terms).get("group_name"))
        return own is None or own == dict(self.terms).get("src")

    @property
    def waits(self) -> bool:
        """Whether the result is there when the operator returns."""
        return self.family == "shard_dim_alltoall"


def describe_collective(operator: Operator, args: Sequence[Any], kwargs: dict[str, Any]) -> Collective:
    """Read a call of an operator whose role is `Role.COLLECTIVE`."""
    given = next(value for name in _INPUTS if (value := argument(operator, args, kwargs, name)) is not None)
    terms = []
    for name in _TERMS[_family(operator.base)]:
        value = argument(operator, args, kwargs, name)
        if value is not None:
            reduction = str(value).rpartition(".")[2].lower()  # as ``sum``; it may be an object that stands for that
            terms.append(("reduce_op", reduction) if name in _REDUCTIONS else (name, _plain(value)))
    out = kwargs.get("out")
    return Collective(
        _family(operator.base),
        tuple(terms),
        tuple(given) if isinstance(given, (list, tuple)) else (given,),
        bool(operator.mutated) and out is None,
        out,
        isinstance(given, (list, tuple)),
    )


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(int(item) for item in value)
    return getattr(value, "group_name", value)


def communicates(gm: fx.GraphModule) -> bool:
    """Whether a Dynamo graph, or a body in it, may exchange tensors with other ranks."""
    return any(
        exchanges_anything(node)
        for module in gm.modules()
        if isinstance(module, fx.GraphModule)
        for node in module.graph.nodes
    )


def exchanges_anything(node: fx.Node) -> bool:
    """Whether a node of a Dynamo graph may exchange tensors with other ranks."""
    if is_distributed_tensor(node.meta.get("example_value")) or is_distributed_tensor(node.meta.get("val")):
        return True
    if node.op != "call_function":
        return False
    target: Any = node.target
    home = _home(target)
    return home in _FUNCTIONAL | _OPAQUE or str(getattr(target, "__module__", "")).startswith(_MODULES)


def _home(target: Any) -> str:
    own = getattr(target, "namespace", None)
    return own if isinstance(own, str) else str(getattr(target, "_qualified_op_name", "")).partition("::")[0]


def node_role(node: fx.Node) -> Role | None:
    """The part of a node that `exchanges_anything`; ``NONE`` for one that only wraps what was received.

    None where it calls no operator of torch's collectives.
    """
    home = _home(node.target)
    return _role(home, _base(node)) if node.op == "call_function" and home in _FUNCTIONAL | _OPAQUE else None


def _base(node: fx.Node) -> str:
    return str(getattr(node.target, "__name__", "")).partition(".")[0]


def collective_lines(gm: fx.GraphModule) -> dict[str, list[str]]:
    """The source lines of a Dynamo graph's collectives, in order, by family."""
    lines: dict[str, list[str]] = {}
    for node in gm.graph.nodes:
        if node.op == "call_function" and exchanges_anything(node) and (family := _family(_base(node))) in _TERMS:
            lines.setdefault(family, []).append(source_line(node) or "")
    return lines


def pending_inputs(gm: fx.GraphModule) -> tuple[int, ...]:
    """The inputs that a Dynamo graph waits for: the program has begun an exchange that writes to them."""
    waits = [node for node in gm.graph.nodes if node_role(node) is Role.WAIT]
    inputs = gm.graph.find_nodes(op="placeholder")
    return tuple(place for place, node in enumerate(inputs) if any(node in wait.all_input_nodes for wait in waits))


def returns_pending_collectives(gm: fx.GraphModule) -> bool:
    """Whether a Dynamo graph begins an exchange for whose result it does not wait: the program does, later."""
    return any(
        not any(node_role(user) is Role.WAIT for one in (node, *node.users) for user in one.users)
        for node in gm.graph.nodes
        if node_role(node) is Role.COLLECTIVE
    )


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
            role = node_role(node)
            if role is None or role is Role.OPAQUE or _family(_base(node)) in _ONE_SIDED:
                return f"{node.name} ({node.target}) is no exchange whose results are its own"
            if role is Role.COLLECTIVE and _base(node).endswith(("_", "_out")):
                return f"{node.name} ({node.target}) writes what it receives to a given tensor"
    return ""


def _collectives(gm: fx.GraphModule) -> Iterator[tuple[fx.Node, Role, Sequence[fx.Node]]]:
    for node in list(gm.graph.nodes):
        if exchanges_anything(node) and (role := node_role(node)) is not None:
            yield node, role, _operands(node)


def _operands(node: fx.Node) -> Sequence[fx.Node]:
    first = node.args[0] if node.args else None
    many: Any = first if isinstance(first, (list, tuple)) else (first,)
    return [one for one in many if isinstance(one, fx.Node)]


def _names(node: fx.Node, count: int, before: Sequence[str]) -> list[str]:
    family = _family(_base(node))
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
