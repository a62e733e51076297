"""Turn a graph into one Python function that runs it, with the checks of every node in line.

The function for ``relu`` in a graph with a dynamic batch::

    def forward(run, args_list):
        _v0, _v1, = args_list
        args_list.clear()
        s0 = _v0 if isinstance(_v0, (int, float)) else UNKNOWN
        ...
        _s0 = (s0, 3)
        _v2 = _k1(_v1)
        if (_c2_0 := _as_recorded1(_v2, _k0, _s0, (3, 1), 0)) is None: _c2_0 = run.fail(2, 0, _v2, locals())
        elif _c2_0 == _c1_0: run.alias(2, 0, _c2_0, locals())
        del _v1
        return [_v2]

``_as_recorded1`` compares dtype, layout, device, shape, strides and offset, and returns the identity of the storage.
A check that holds costs a few attribute reads. A check that fails calls ``run``, which compares again in detail.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
from torch import fx

from checked_backend._torch.graph_code import forward_from_source
from checked_backend._torch.symbols import deferred_asserts
from checked_backend.graphs.nodes import is_getitem
from checked_backend.graphs.schema import is_custom, read_only_inputs
from checked_backend.metadata.codegen_tensor import TensorCheckWriter
from checked_backend.metadata.expected import ExpectedTensor, ExpectedValue, Leaf, expected_leaves, recorded
from checked_backend.metadata.plan import (
    CheckSettings,
    NodePlan,
    items_of,
    last_uses,
    producer,
    shape_env,
    tokens,
    with_effects,
)

__all__ = ["GraphCode", "emit"]


@dataclass(slots=True)
class GraphCode:
    """A graph's code.

    Attributes:
        function: ``(run, args_list) -> outputs``.
        source: Its source.
        plans: One per node.
        position: The index of each node among the plans.
        variables: For each symbolic size, the variable of the function that holds it.
        asserts: The trace's assumptions about sizes that depend on data, each with its message.
        unchecked: The number of nodes without recorded metadata.
    """

    function: Callable[..., Any]
    source: str
    plans: list[NodePlan]
    position: Mapping[fx.Node, int]
    variables: Mapping[sympy.Basic, str]
    asserts: list[tuple[sympy.Basic, str]]
    unchecked: int


def emit(gm: fx.GraphModule, settings: CheckSettings, subgraphs: Mapping[fx.Node, Any]) -> GraphCode:
    """Analyse a graph and compile its code.

    Args:
        settings: The user's choice of checks.
        subgraphs: For nodes that fetch a graph for a higher-order operator, the module to hand to the operator instead.
    """
    return _Emitter(gm, settings, subgraphs).emit()


class _Emitter(TensorCheckWriter):
    def __init__(self, gm: fx.GraphModule, settings: CheckSettings, subgraphs: Mapping[fx.Node, Any]) -> None:
        super().__init__(gm, settings, subgraphs)
        self.tokens = tokens(gm.graph)
        self.unchecked = 0

    def emit(self) -> GraphCode:
        nodes = list(self.gm.graph.nodes)
        inputs = [node for node in nodes if node.op == "placeholder"]
        if inputs:
            self.lines.append(f"{', '.join(map(self.variable, inputs))}, = args_list")
        self.lines.append("args_list.clear()")
        dying = last_uses(nodes)
        for node in nodes:
            if node.op == "output":
                self.asserts()
                self.lines.append(f"return {self.argument(node.args[0])}")
                continue
            if node.op != "placeholder":
                self.lines.append(f"{self.variable(node)} = {self.call(node)}")
            self.check(node)
            if dead := dying.get(node):
                self.lines.append(f"del {', '.join(map(self.variable, dead))}")
        source = self.prelude() + "def forward(run, args_list):\n    " + "\n    ".join(self.lines) + "\n"
        function = forward_from_source(source, {**self.names, **self.table.functions})
        return GraphCode(
            function, source, self.plans, self.position, self.table.variables, self.checked_asserts, self.unchecked
        )

    # checking a node

    def check(self, node: fx.Node) -> None:
        plan = self.plans[self.position[node]]
        plan.inputs = tuple(self.position[producer(item)] for item in node.all_input_nodes)
        has_value, value = recorded(node)
        if node in self.tokens or node in self.subgraphs:
            return
        if not has_value:
            self.unchecked += node.op not in ("get_attr",)
            return
        if is_getitem(node) and self.passed_on(node, value):
            return
        plan.leaves = leaves = expected_leaves(value)
        plan.compared = self.compares(node, leaves)
        free = read_only_inputs(node)
        plan.allowed = frozenset(self.position[producer(item)] for item in node.all_input_nodes if item not in free)
        index, variable = self.position[node], self.variable(node)
        if len(leaves) == 1 and not isinstance(value, (tuple, list, dict)):
            self.leaf(node, 0, leaves[0], variable, node)
        else:
            parts = [f"_x{index}_{k}" for k in range(len(leaves))]
            if parts:
                names = ", ".join(parts)
                self.lines.append(f"if type({variable}) in (tuple, list) and len({variable}) == {len(parts)}:")
                self.lines.append(f"    {names}, = {variable}")
                self.lines.append(f"else: {names}, = run.leaves({index}, {variable}, {len(parts)}, locals())")
                items = items_of(node)
                first = 1 if with_effects(node) else 0  # its first result is a token
                for k, (leaf, part) in enumerate(zip(leaves, parts, strict=True)):
                    if k >= first:
                        self.leaf(node, k, leaf, part, items.get(k))
                self.lines.append(f"del {names}")
        if self.settings.nonfinite and not self.settings.light and node.op.startswith("call"):
            given = "".join(f"{self.variable(item)}, " for item in node.all_input_nodes)
            self.lines.append(f"run.finite({index}, {variable}, ({given}), locals())")

    def compares(self, node: fx.Node, leaves: Sequence[Leaf]) -> bool:
        """Whether any of the chosen checks applies to a node."""
        checks = set(self.settings.checks)
        if self.settings.ignores(node):
            return False
        if self.settings.nonfinite and not self.settings.light and node.op.startswith("call"):
            return True
        if is_custom(node) and not self.settings.light and checks & {"mutation", "requires_grad"}:
            return True
        tensors = any(isinstance(leaf, ExpectedTensor) for leaf in leaves)
        values = any(isinstance(leaf, ExpectedValue) for leaf in leaves)
        of_tensors = checks - {"assert", "mutation", "requires_grad", "value"}
        return (tensors and bool(of_tensors)) or (values and bool(checks & {"structure", "value"}))

    def passed_on(self, node: fx.Node, value: Any) -> bool:
        """Whether a ``getitem`` hands on an output that was checked where it was made."""
        parent, key = node.args
        checked = isinstance(parent, fx.Node) and self.plans[self.position[parent]].leaves is not None
        outputs = recorded(parent)[1] if checked and isinstance(parent, fx.Node) else None
        if (
            not isinstance(outputs, (tuple, list))
            or not isinstance(key, int)
            or not -len(outputs) <= key < len(outputs)
        ):
            return False
        if outputs[key] is value:
            return True
        return expected_leaves(outputs[key]) == expected_leaves(value)

    def leaf(self, node: fx.Node, k: int, leaf: Leaf, variable: str, carrier: fx.Node | None) -> None:
        if isinstance(leaf, ExpectedTensor):
            self.tensor(node, k, leaf, variable, carrier)
        elif isinstance(leaf, ExpectedValue):
            self.value(node, k, leaf.value, variable)

    def value(self, node: fx.Node, k: int, value: Any, variable: str) -> None:
        if isinstance(value, sympy.Basic):
            if not self.table.known(value):
                bind = self.table.bind_truth if isinstance(value, sympy.logic.boolalg.Boolean) else self.table.bind
                given = f"({variable} if isinstance({variable}, (int, float)) else UNKNOWN)"
                self.lines.extend(bind(value, given))
                return
            self.lines.extend(self.table.define(value))
            expected = self.table.text(value)
            exact = value.is_integer or isinstance(value, sympy.logic.boolalg.Boolean)
            differs = f"{variable} != {expected}" if exact else f"not isclose({variable}, {expected})"
        elif value is None or isinstance(value, bool):
            differs = f"{variable} is not {value}"
        elif isinstance(value, float) and not math.isfinite(value):
            return
        else:
            differs = f"{variable} != {self.argument(value)}"
        failed = f"run.fail({self.position[node]}, {k}, {variable}, locals())"
        self.lines.append(f"if isinstance({variable}, Tensor) or {differs}: {failed}")

    @property
    def checked_asserts(self) -> list[tuple[sympy.Basic, str]]:
        """The trace's assumptions about sizes that depend on data, as far as this graph knows those sizes."""
        environment = shape_env(self.gm.graph)
        if environment is None or "assert" not in self.settings.checks:
            return []
        return [
            item
            for item in deferred_asserts(environment)
            if all(s in self.table.variables for s in item[0].free_symbols)
        ]

    def asserts(self) -> None:
        # they are checked at the end, so that a graph which holds the assertion itself raises eager's exception first
        for index, (condition, _) in enumerate(self.checked_asserts):
            self.lines.append(f"if not {self.table.code(condition)}: run.assertion({index}, locals())")
