"""One run of a checked graph: the methods that generated code calls when a fast check fails, and the attribution."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import sympy
import torch
from torch import fx

from checked_backend._torch.pytree import tree_leaves, tree_map_only
from checked_backend._torch.tensors import storage_identity
from checked_backend.findings import Finding
from checked_backend.graphs.schema import is_custom, operator_name
from checked_backend.metadata.attribution import is_own_fault
from checked_backend.metadata.expected import ExpectedTensor, Mismatch, Size, compare
from checked_backend.metadata.findings import NodeMismatch, depended_on, to_finding
from checked_backend.metadata.layout import LAYOUT, dependent
from checked_backend.metadata.nonfinite import MAY_BE_ANYTHING, first_nonfinite
from checked_backend.metadata.plan import NodePlan, producer
from checked_backend.metadata.watch import call_watched

if TYPE_CHECKING:
    from checked_backend.metadata.interpreter import MetadataInterpreter

__all__ = ["GraphRun", "place_of"]

_REMEMBERED = 1000
_FOLLOWS = "it follows from a node that is ignored"
# mismatches that an operator causes by itself, whatever its inputs are
_OF_ITSELF = frozenset({"mutation", "requires_grad", "nonfinite"})


class _Missing:
    """Stands for a missing output, which was reported already."""


_MISSING = _Missing()


class GraphRun:
    """The state of one run, and the detailed side of its checks. Threads and calls must not share it.

    When a fast check fails, generated code calls these methods with its variables, ``locals()``.

    Args:
        outer: The run of the graph that this graph lies in; None for an outermost graph.

    Attributes:
        findings: The findings, in graph order.
        wrong: Positions of nodes that are wrong, each with whether it is wrong only because of something that the user
            ignores.
    """

    def __init__(self, owner: MetadataInterpreter, outer: GraphRun | None) -> None:
        self.findings: list[Finding] = []  # the outermost run holds the findings of the whole run
        self._owner = owner
        self._code = owner.code
        self._outer = outer
        self.wrong: dict[int, bool] = {}
        self._seen: dict[tuple[str, str], int] = {}
        self._untold: list[int] = []  # the findings that were not handed on yet
        self._layout: dict[int, frozenset[int]] = {}  # for each node, its findings on which nothing depends yet

    # called by generated code

    def fail(self, index: int, k: int, value: Any, variables: dict[str, Any]) -> int:
        """Compare an output in detail, after a fast check failed.

        Returns:
            The identity of the storage, 0 if there is none.
        """
        if value is _MISSING:
            return 0
        plan = self._code.plans[index]
        want = (plan.leaves or [])[k]
        if isinstance(want, ExpectedTensor) and plan.node.op == "placeholder":
            want = replace(want, offset=None)
        elif isinstance(want, ExpectedTensor) and k in plan.bases and want.offset is not None:
            want = replace(want, offset=self._moved(plan, k, want.offset, variables))
        place = k if len(plan.leaves or []) > 1 else None
        self._add(plan, compare(want, value, place, self._value_of(variables), self._owner.settings.checks), variables)
        settings = self._owner.settings
        if settings.light or "alias" not in settings.checks or not isinstance(value, torch.Tensor):
            return 0
        if value.layout is not torch.strided or value.is_nested:
            return 0
        storage = storage_identity(value)
        self.alias(index, k, storage, variables)
        return storage

    def alias(self, index: int, k: int, storage: int, variables: dict[str, Any]) -> None:
        """Find the owner of the memory in which an output unexpectedly lies."""
        plan = self._code.plans[index]
        place = k if len(plan.leaves or []) > 1 else None
        if plan.node.op != "call_function":
            return
        inputs = {
            position: storages
            for position in plan.inputs
            if (storages := {value for name, value in variables.items() if name.startswith(f"_c{position}_") and value})
        }
        base, _, held = plan.bases.get(k, (None, 0, ""))
        maker = None if base is None else self._position[producer(self._code.plans[base].node)]
        shared = [position for position, storages in inputs.items() if storage in storages]
        undeclared = [p for p in shared if p not in plan.allowed and (p != maker or is_custom(plan.node))]
        if undeclared:
            names = ", ".join(self._code.plans[position].node.name for position in undeclared)
            self._add(plan, [Mismatch("alias", place, "memory of its own", f"the memory of {names}")], variables)
        elif base is not None and not shared and variables.get(held):
            name = self._code.plans[base].node.name
            self._add(plan, [Mismatch("alias", place, f"a view of {name}", "memory of its own")], variables)

    def leaves(self, index: int, value: Any, count: int, variables: dict[str, Any]) -> list[Any]:
        """The outputs of a node, flat. Their number is the recorded one, whatever the node returned."""
        found = tree_leaves(value)
        if len(found) == count:
            return found
        mismatch = Mismatch("structure", None, f"{count} values", f"{len(found)} values")
        self._add(self._code.plans[index], [mismatch], variables)
        return [_MISSING] * count

    def custom(self, index: int, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a custom operator, and check that it keeps to its schema."""
        plan, checks = self._code.plans[index], self._owner.settings.checks
        memory = self._owner.history.memory
        # an operator may change the shape or the strides of its inputs
        given = tree_map_only(torch.Tensor, torch.Tensor.detach, (args, kwargs))
        result, mismatches = call_watched(plan.node, target, args, kwargs, checks=checks, memory=memory)
        self._add(plan, mismatches, {}, given)
        return result

    def finite(self, index: int, value: Any, given: tuple[Any, ...], variables: dict[str, Any]) -> None:
        """Look for a NaN or an infinity that a node made of finite inputs."""
        plan = self._code.plans[index]
        if operator_name(plan.node).split(".")[1:2] and operator_name(plan.node).split(".")[1] in MAY_BE_ANYTHING:
            return
        mismatch = first_nonfinite(plan.node, value, given)
        if mismatch is not None:
            self._add(plan, [mismatch], variables)

    def assertion(self, index: int, variables: dict[str, Any]) -> None:
        """Report that an assumption of the trace about sizes that depend on data does not hold."""
        condition, message = self._code.asserts[index]
        value_of = self._value_of(variables)
        values = {str(symbol): value_of(symbol) for symbol in condition.free_symbols}
        if None in values.values():
            return
        texts = ", ".join(f"{name}={value}" for name, value in sorted(values.items()))
        plan = self._maker_of(condition)
        self._add(plan, [Mismatch("assert", None, str(condition), texts, message)], variables)

    # the work behind these methods

    def _maker_of(self, condition: sympy.Basic) -> NodePlan:
        """The first node in whose recorded value a symbol of the condition appears."""
        for plan in self._code.plans:
            for leaf in plan.leaves or ():
                sizes: list[Any] = [*(getattr(leaf, "shape", None) or ()), getattr(leaf, "value", None)]
                if any(isinstance(s, sympy.Basic) and s.free_symbols & condition.free_symbols for s in sizes):
                    return plan
        return self._code.plans[-1]

    @property
    def _position(self) -> Mapping[fx.Node, int]:
        return self._code.position

    def _value_of(self, variables: dict[str, Any]) -> Callable[[Size], Any]:
        def value_of(size: Size) -> Any:
            if not isinstance(size, sympy.Basic):
                return size
            value = variables.get(self._code.variables.get(size, ""))
            return None if value is None or value != value else value

        return value_of

    def _moved(self, plan: NodePlan, k: int, expected: Size, variables: dict[str, Any]) -> Size | None:
        """The storage offset that a view must have, given the real offset of its base."""
        position, begins, _ = plan.bases[k]
        value_of = self._value_of(variables)
        base = variables.get(f"_v{position}")
        want, began = value_of(expected), value_of(begins)
        if not isinstance(base, torch.Tensor) or want is None or began is None:
            return None
        return expected if base.storage_offset() == began else int(base.storage_offset() + want - began)

    def _add(
        self,
        plan: NodePlan,
        mismatches: Sequence[Mismatch],
        variables: dict[str, Any],
        given: tuple[tuple[Any, ...], dict[str, Any]] | None = None,
    ) -> None:
        if not mismatches:
            return
        index = self._position[plan.node]
        for mismatch in mismatches:
            found = NodeMismatch(
                plan.node, mismatch, self._owner.kind, place_of(self._owner), given or self._inputs(plan, variables)
            )
            found = self._attributed(found, plan)
            ignored = bool(found.ignored)
            self.wrong[index] = ignored and self.wrong.get(index, True)
            if plan.node.op != "placeholder" and self._owner.kind == "forward":
                names = (item.name for item in (plan.node, *plan.node.users))
                self._owner.history.hand_on(names, ignored=ignored)
            self._deliver(found, plan, ignored=ignored)

    def _attributed(self, found: NodeMismatch, plan: NodePlan) -> NodeMismatch:
        """The mismatch, marked if it merely follows from an earlier one, or if the user ignores it."""
        causes = self._causes(plan, found.mismatch)
        if causes and is_custom(plan.node):
            known, key = self._owner.history.own_faults, f"{found.graph} {found.subject}"
            if key not in known:
                known[key] = is_own_fault(plan.node, found.inputs)
            causes = [] if known[key] else causes
        settings = self._owner.settings
        entry = settings.ignores(plan.node) or settings.hides(found.kind.value, found.detail, found.subject)
        follows = _FOLLOWS if causes and all(causes) else ""
        return replace(found, inherited=bool(causes), ignored=entry or follows)

    def _causes(self, plan: NodePlan, mismatch: Mismatch) -> list[bool]:
        """For each earlier mismatch that may have made a node wrong, whether the user ignores that mismatch."""
        if plan.node.op == "placeholder":
            return self._causes_outside(plan.node)
        alone = mismatch.what in _OF_ITSELF or (
            mismatch.what == "alias" and is_custom(plan.node) and not mismatch.expected.startswith("a view")
        )
        # a graph that a higher-order operator runs is part of that operator, not an input
        inputs = [p for p in plan.inputs if not alone or self._code.plans[p].node.op == "get_attr"]
        return [self.wrong[position] for position in inputs if position in self.wrong]

    def _causes_outside(self, node: fx.Node) -> list[bool]:
        """The same for an input of the graph, which comes from an earlier graph or from the graph around this one."""
        known, outer = self._owner.history.wrong, self._outer
        if outer is None:
            return [known[node.name]] if node.name in known else []
        users = outer._code.plans[self._owner.place[0]].node.users
        given = dict.fromkeys(item for user in users for item in user.all_input_nodes)
        positions = {outer._position[place] for item in given for place in (item, producer(item))}
        return [outer.wrong[position] for position in sorted(positions) if position in outer.wrong]

    def _inputs(self, plan: NodePlan, variables: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """The real arguments of a node, as far as they still exist."""
        names = {item: f"_v{self._position[item]}" for item in plan.node.all_input_nodes}
        if plan.node.op != "call_function" or any(name not in variables for name in names.values()):
            return None
        args, kwargs = fx.node.map_arg((plan.node.args, plan.node.kwargs), lambda item: variables[names[item]])
        return args, kwargs

    def tell(self) -> None:
        """Hand on the findings that were not handed on yet."""
        untold, self._untold = sorted(self._untold), []
        if untold:
            self._owner.on_findings(tuple(self.findings[number] for number in untold))

    def _deliver(self, found: NodeMismatch, plan: NodePlan, *, ignored: bool) -> None:
        root, runs = self, [(self, self._position[plan.node])]
        while root._outer is not None:
            # the mismatch makes the results of the inner graph wrong
            place, root = root._owner.place[0], root._outer
            root.wrong[place] = ignored and root.wrong.get(place, True)
            runs.append((root, place))
        key = (found.subject, found.mismatch.what)
        known = root._seen.get(key)  # a loop's body runs many times
        number = root._seen.setdefault(key, len(root.findings))
        before = self._layout_before(plan) if found.inherited else frozenset()
        layout = found.mismatch.what in LAYOUT
        reason = dependent(found.node, found.mismatch.index) if layout else ""
        if known is None:
            root.findings.append(self._finding(replace(found, depended=reason)))
            root._untold.append(number)
        if found.ignored:
            return
        if layout and not reason:
            for run, place in runs:
                run._layout[place] = run._layout.get(place, frozenset()) | before | {number}
        else:
            root._depend(before, found.subject)
        if root._owner.immediate and not (layout and not reason and root._owner.patient):
            root.tell()

    def _finding(self, found: NodeMismatch) -> Finding:
        """The finding of a mismatch. It is remembered, because the next call has the same mismatch."""
        told = self._owner.history.told
        if len(told) >= _REMEMBERED:  # sizes may differ in each call
            told.clear()
        key = (found.graph, found.subject, found.mismatch, found.inherited, found.ignored, found.depended)
        return told.get(key) or told.setdefault(key, to_finding(found))

    def _layout_before(self, plan: NodePlan) -> frozenset[int]:
        """The findings about layout that a node's inputs carry, on which nothing depends so far."""
        return frozenset().union(*(self._layout.get(position, frozenset()) for position in plan.inputs))

    def _depend(self, numbers: frozenset[int], subject: str) -> None:
        """Mark findings as depended on, because a mismatch that matters follows from them."""
        for number in numbers:
            finding = self.findings[number]
            if not finding.more_than_layout:
                self.findings[number] = depended_on(finding, f"{subject} follows from it")


def place_of(owner: MetadataInterpreter) -> str:
    """The place of an inner graph, from the inside to the outside; "" for the outermost graph."""
    places = []
    while owner.parent is not None:
        places.append(owner.place[1])
        owner = owner.parent
    return ", in ".join(places)
