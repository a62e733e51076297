"""Describe what operators exchange with other ranks: the collective, its group, the tensors that are sent."""

from __future__ import annotations

from collections.abc import Sequence
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


@dataclass(frozen=True, slots=True)
class NodeRole:
    """The part that a node of a Dynamo graph plays in a program of several ranks.

    Attributes:
        role: Its part; ``NONE`` for one that only wraps what was received.
        family: The kind of its collective; "" for any other part.
        in_place: Whether it writes what it receives to a tensor that it is given.
    """

    role: Role
    family: str = ""
    in_place: bool = False


def node_role(node: fx.Node) -> NodeRole | None:
    """Read a node that `exchanges_anything`; None where it calls no operator of torch's collectives."""
    if node.op != "call_function" or _home(node.target) not in _FUNCTIONAL | _OPAQUE:
        return None
    base = _base(node)
    role = _role(_home(node.target), base)
    return NodeRole(role, _family(base), base.endswith(("_", "_out"))) if role is Role.COLLECTIVE else NodeRole(role)


def _base(node: fx.Node) -> str:
    return str(getattr(node.target, "__name__", "")).partition(".")[0]


def collective_lines(gm: fx.GraphModule) -> dict[str, list[str]]:
    """The source lines of a Dynamo graph's collectives, in order, by family."""
    lines: dict[str, list[str]] = {}
    for node in gm.graph.nodes:
        if node.op == "call_function" and exchanges_anything(node) and (family := _family(_base(node))) in _TERMS:
            lines.setdefault(family, []).append(source_line(node) or "")
    return lines


def _has_role(node: fx.Node, role: Role) -> bool:
    known = node_role(node)
    return known is not None and known.role is role


def pending_inputs(gm: fx.GraphModule) -> tuple[int, ...]:
    """The inputs that a Dynamo graph waits for: the program has begun an exchange that writes to them."""
    waits = [node for node in gm.graph.nodes if _has_role(node, Role.WAIT)]
    inputs = gm.graph.find_nodes(op="placeholder")
    return tuple(place for place, node in enumerate(inputs) if any(node in wait.all_input_nodes for wait in waits))


def returns_pending_collectives(gm: fx.GraphModule) -> bool:
    """Whether a Dynamo graph begins an exchange for whose result it does not wait: the program does, later."""
    return any(
        not any(_has_role(user, Role.WAIT) for one in (node, *node.users) for user in one.users)
        for node in gm.graph.nodes
        if _has_role(node, Role.COLLECTIVE)
    )
