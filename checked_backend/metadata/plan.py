"""Facts about a graph's structure: the maker and the last user of each value, and the values that are only tokens."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from checked_backend._torch.operators import HigherOrderOperator
from checked_backend.graphs.nodes import is_getitem
from checked_backend.graphs.schema import operator_name
from checked_backend.metadata.expected import recorded

__all__ = [
    "CheckSettings",
    "is_index",
    "items_of",
    "last_uses",
    "plain_name",
    "producer",
    "shape_env",
    "tokens",
    "with_effects",
]


@dataclass(frozen=True, slots=True)
class CheckSettings:
    """The user's choice of checks for a graph.

    Attributes:
        ignore_ops: Operators whose findings are not reported, as ``aten.relu``, ``aten.relu.default`` or ``mylib::op``.
        ignore: Findings that are not reported: kinds, finer kinds or subjects.
        light: Compare dtypes and shapes only, because the graph runs under `torch.vmap`, which wraps its tensors.
    """

    checks: Collection[str]
    ignore_ops: Collection[str] = ()
    ignore: Collection[str] = ()
    nonfinite: bool = False
    light: bool = False

    def ignores(self, node: fx.Node) -> str | None:
        """The entry of ``ignore_ops`` that names this node's operator; None if there is none."""
        name = operator_name(node)
        names = (name, name.rpartition(".")[0])
        return next((entry for entry in self.ignore_ops if plain_name(entry) in names), None)

    def hides(self, *words: str) -> str | None:
        """The first entry of ``ignore`` among a finding's kind, finer kind and subject; None if there is none."""
        return next((word for word in words if word in self.ignore), None)


def plain_name(entry: str) -> str:
    """The name used here (``mylib.op``) for an operator as users write it (``torch.ops.aten.relu``, ``mylib::op``)."""
    return entry.strip().removeprefix("torch.ops.").removeprefix("higher_order.").replace("::", ".")


def is_index(dtype: torch.dtype) -> bool:
    """Whether a dtype is an integer dtype. Under `torch.vmap` indices have another width than when they were traced."""
    return not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool)


def producer(node: fx.Node) -> fx.Node:
    """The node that computes a value, behind the ``getitem`` that picks it."""
    while is_getitem(node) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def items_of(node: fx.Node) -> dict[int, fx.Node]:
    """For each output of a node, a ``getitem`` that picks it."""
    return {user.args[1]: user for user in node.users if is_getitem(user) and isinstance(user.args[1], int)}


def with_effects(node: fx.Node) -> bool:
    """Whether a node runs an operator with an effect, ordered by a token."""
    return isinstance(node.target, HigherOrderOperator) and node.target.name() == "with_effects"


def tokens(graph: fx.Graph) -> set[fx.Node]:
    """The nodes that are effect tokens. Tokens order operators, and are None or empty when the graph runs."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if with_effects(node):
            found.update(arg for arg in node.args[:1] if isinstance(arg, fx.Node))
            found.update(user for user in node.users if is_getitem(user) and user.args[1] == 0)
    return found


def last_uses(nodes: Sequence[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """For each node, the values that no later node needs."""
    seen: set[fx.Node] = set()
    found: dict[fx.Node, list[fx.Node]] = {}
    for node in reversed(nodes):
        dead = [item for item in node.all_input_nodes if item not in seen]
        seen.update(dead)
        if not node.users and node.op != "output":
            dead.append(node)
        found[node] = dead
    return found


def shape_env(graph: fx.Graph) -> Any:
    """The shape environment that a graph's symbols belong to; None for a static graph."""
    for node in graph.nodes:
        value = recorded(node)[1]
        mode = getattr(value, "fake_mode", None)
        shape_env = getattr(mode, "shape_env", None) or getattr(getattr(value, "node", None), "shape_env", None)
        if shape_env is not None:
            return shape_env
    return None
