"""Run a graph and compare every real value with the metadata recorded for it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any, get_args

import sympy
import torch
from torch import fx

from checked_backend._torch import HigherOrderOperator, tree_leaves
from checked_backend.errors import MetadataError
from checked_backend.interpret.emit import GraphCode, emit
from checked_backend.interpret.expected import ExpectedTensor, Mismatch, Size, compare
from checked_backend.interpret.findings import Problem, metadata_error, to_finding
from checked_backend.interpret.nonfinite import MAY_BE_ANYTHING, first_nonfinite
from checked_backend.interpret.plan import NodePlan, Settings
from checked_backend.interpret.schema import operator_name
from checked_backend.interpret.watch import call_watched
from checked_backend.options import MetadataCheck
from checked_backend.record import Finding

__all__ = ["CHECKS", "MetadataInterpreter", "metadata_error"]

CHECKS: tuple[str, ...] = get_args(MetadataCheck)
_UNDER_VMAP = frozenset({"flex_attention", "flex_attention_backward", "associative_scan"})
_PLAIN = (torch.Tensor, torch.nn.Parameter, int, float, bool, type(None), torch.Generator)


class _Missing:
    """Stands for an output that is not there; that was reported already."""


_MISSING = _Missing()


class MetadataInterpreter:
    """Checks one graph on every run.

    A graph is read once, here, and becomes one Python function with the checks in line; a run does comparisons of plain
    numbers only.

    Args:
        gm: An AOT graph, or any graph whose nodes carry ``meta["val"]``.
        kind: Its graph kind, for findings.
        on_findings: Given the findings of a run, in graph order. What it raises ends the run.
        checks: Which checks, of `CHECKS`.
        ignore_ops: Operators that are not checked: ``aten.relu``, ``aten.relu.default``, ``mylib::op``.
        nonfinite: Also look for the first node that makes a NaN or an infinity of finite inputs.
        wrong_before: Names of values that were found wrong in the graphs that ran before this one, which hand them
            on under the same names; this graph adds its own.
        immediate: Give each node's findings to ``on_findings`` before the next node runs, not at the end.
    """

    def __init__(
        self,
        gm: fx.GraphModule,
        kind: str,
        on_findings: Callable[[Sequence[Finding]], None],
        *,
        checks: Collection[str] = CHECKS,
        ignore_ops: Collection[str] = (),
        nonfinite: bool = False,
        immediate: bool = False,
        wrong_before: set[str] | None = None,
        _parent: MetadataInterpreter | None = None,
        _place: tuple[int, str] = (0, ""),
        _light: bool = False,
    ) -> None:
        self.kind = kind
        self.on_findings = on_findings
        self.immediate = immediate
        self.settings = Settings(frozenset(checks), frozenset(ignore_ops), nonfinite, _light)
        self.parent = _parent
        self.place = _place
        self.wrong_before = set() if wrong_before is None else wrong_before
        self.running: _Running = _Running() if _parent is None else _parent.running
        self._original = gm.forward
        children = self._children(gm)
        self.code: GraphCode = emit(gm, self.settings, {node: child.module for node, child in children.items()})
        self.checked_nodes: int = sum(plan.leaves is not None for plan in self.code.plans)
        self.checked_nodes += sum(child.checked_nodes for child in children.values())
        self.unchecked_nodes: int = self.code.unchecked + sum(child.unchecked_nodes for child in children.values())
        self.module: fx.GraphModule = self._as_module(gm) if _parent is not None else gm

    def _children(self, gm: fx.GraphModule) -> dict[fx.Node, MetadataInterpreter]:
        """One interpreter for each graph that a higher-order operator is given."""
        children = {}
        for position, node in enumerate(gm.graph.nodes):
            users = [user for user in node.users if isinstance(user.target, HigherOrderOperator)]
            if node.op != "get_attr" or not users:
                continue
            graph: Any = gm
            for name in str(node.target).split("."):
                graph = getattr(graph, name, None)
            if not isinstance(graph, fx.GraphModule):
                continue
            user = users[0]
            children[node] = MetadataInterpreter(
                graph,
                self.kind,
                self.on_findings,
                checks=self.settings.checks,
                ignore_ops=self.settings.ignore_ops,
                nonfinite=self.settings.nonfinite,
                immediate=self.immediate,
                _parent=self,
                _place=(position, f"{node.target} of {operator_name(user)}"),
                _light=self.settings.light or operator_name(user) in _UNDER_VMAP,
            )
        return children

    def _as_module(self, gm: fx.GraphModule) -> fx.GraphModule:
        """The graph as a module that checks itself, to be handed to a higher-order operator."""
        module = fx.GraphModule(gm, gm.graph)
        module.forward = self._run_within
        return module

    def _run_within(self, *args: Any) -> Any:
        outer = self.running.run
        plain = self.settings.light or all(type(arg) in _PLAIN for arg in args)
        if outer is None or not plain:
            return self._original(*args)  # torch traces the graph anew, for example to differentiate it
        run = Run(self, outer)
        return self.code.function(run, list(args))

    def __call__(self, args: list[Any]) -> Any:
        """Run the graph on a list of inputs, which is emptied (the boxed convention)."""
        run = Run(self, None)
        before, self.running.run = self.running.run, run
        try:
            result = self.code.function(run, args)
        except MetadataError:
            raise
        except Exception as error:
            # an operator often fails because of a mismatch before it: that mismatch is the better message
            if run.findings:
                self._report(run.findings, error)
            raise
        finally:
            self.running.run = before
        if run.findings:
            self.on_findings(tuple(run.findings))
        return result

    def _report(self, findings: Sequence[Finding], error: Exception) -> None:
        try:
            self.on_findings(tuple(findings))
        except MetadataError as mismatch:
            raise mismatch from error


class _Running(threading.local):
    """The run that this thread is in, for graphs inside of the graph."""

    run: Run | None = None


class Run:
    """One run: the state that must not be shared between threads or calls, and the slow side of the checks.

    Generated code calls these methods with ``locals()``, its variables, when a fast check does not hold.
    """

    def __init__(self, owner: MetadataInterpreter, outer: Run | None) -> None:
        self.findings: list[Finding] = []
        self._owner = owner
        self._code = owner.code
        self._outer = outer
        self._wrong: set[int] = set()
        self._seen: set[tuple[str, str]] = set()

    # called by generated code

    def fail(self, index: int, k: int, value: Any, variables: dict[str, Any]) -> int:
        """A fast check did not hold: compare in detail.

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
        storage = int(value.untyped_storage()._cdata)
        self.alias(index, k, storage, variables)
        return storage

    def alias(self, index: int, k: int, storage: int, variables: dict[str, Any]) -> None:
        """An output lies in other memory than expected: say whose."""
        plan = self._code.plans[index]
        place = k if len(plan.leaves or []) > 1 else None
        if plan.node.op != "call_function":
            return
        inputs = {
            position: storages
            for position in plan.inputs
            if (storages := {value for name, value in variables.items() if name.startswith(f"_c{position}_") and value})
        }
        base = plan.bases.get(k, (None, 0))[0]
        shared = [position for position, storages in inputs.items() if storage in storages]
        undeclared = [p for p in shared if p not in plan.allowed and (p != base or _is_custom(plan))]
        if undeclared:
            names = ", ".join(self._code.plans[position].node.name for position in undeclared)
            self._add(plan, [Mismatch("alias", place, "memory of its own", f"the memory of {names}")], variables)
        elif base is not None and not shared and base in inputs and len(inputs[base]) == 1:
            name = self._code.plans[base].node.name
            self._add(plan, [Mismatch("alias", place, f"a view of {name}", "memory of its own")], variables)

    def leaves(self, index: int, value: Any, count: int, variables: dict[str, Any]) -> list[Any]:
        """The outputs of a node, flat; as many as were recorded, whatever ran."""
        found = tree_leaves(value)
        if len(found) == count:
            return found
        mismatch = Mismatch("structure", None, f"{count} values", f"{len(found)} values")
        self._add(self._code.plans[index], [mismatch], variables)
        return [_MISSING] * count

    def custom(self, index: int, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call an operator that does not come with torch, and watch what it does to its inputs."""
        plan = self._code.plans[index]
        result, mismatches = call_watched(plan.node, target, args, kwargs)
        checks = self._owner.settings.checks
        self._add(plan, [mismatch for mismatch in mismatches if mismatch.what in checks], {}, (args, kwargs))
        return result

    def finite(self, index: int, value: Any, given: tuple[Any, ...], variables: dict[str, Any]) -> None:
        """Look for NaN and infinity that a node made of finite inputs."""
        plan = self._code.plans[index]
        if operator_name(plan.node).split(".")[1:2] and operator_name(plan.node).split(".")[1] in MAY_BE_ANYTHING:
            return
        problem = first_nonfinite(plan.node, value, given)
        if problem is not None:
            self._add(plan, [problem], variables)

    def assertion(self, index: int, variables: dict[str, Any]) -> None:
        """A condition on sizes that depend on data, which the trace took for granted, does not hold."""
        condition, message = self._code.asserts[index]
        value_of = self._value_of(variables)
        values = {str(symbol): value_of(symbol) for symbol in condition.free_symbols}
        if None in values.values():
            return
        texts = ", ".join(f"{name}={value}" for name, value in sorted(values.items()))
        plan = self._maker_of(condition)
        self._add(plan, [Mismatch("assert", None, str(condition), texts, message)], variables)

    # behind them

    def _maker_of(self, condition: sympy.Basic) -> NodePlan:
        """The first node in whose recorded value a symbol of the condition appears."""
        for plan in self._code.plans:
            for leaf in plan.leaves or ():
                sizes: list[Any] = [*(getattr(leaf, "shape", None) or ()), getattr(leaf, "value", None)]
                if any(isinstance(s, sympy.Basic) and s.free_symbols & condition.free_symbols for s in sizes):
                    return plan
        return self._code.plans[-1]

    def _value_of(self, variables: dict[str, Any]) -> Callable[[Size], Any]:
        def value_of(size: Size) -> Any:
            if not isinstance(size, sympy.Basic):
                return size
            value = variables.get(self._code.variables.get(size, ""))
            return None if value is None or value != value else value

        return value_of

    def _moved(self, plan: NodePlan, k: int, expected: Size, variables: dict[str, Any]) -> Size | None:
        """The storage offset that a view must have, given where its base really begins."""
        position, begins = plan.bases[k]
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
        index = next((i for i, other in enumerate(self._code.plans) if other is plan), 0) if mismatches else 0
        for mismatch in mismatches:
            inherited = not self._wrong.isdisjoint(plan.inputs)
            if plan.node.op == "placeholder":
                inherited = plan.node.name in self._owner.wrong_before
            elif self._owner.kind == "forward":
                self._owner.wrong_before.update(item.name for item in (plan.node, *plan.node.users))
            inputs = given or self._inputs(plan, variables)
            problem = Problem(plan.node, mismatch, self._owner.kind, self._place(), inherited, inputs)
            self._wrong.add(index)
            self._deliver(problem)

    def _place(self) -> str:
        places, owner = [], self._owner
        while owner.parent is not None:
            places.append(owner.place[1])
            owner = owner.parent
        return ", in ".join(places)

    def _inputs(self, plan: NodePlan, variables: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """The real arguments of a node, as far as they still exist."""
        nodes = {node: f"_v{i}" for i, node in enumerate(other.node for other in self._code.plans)}
        if plan.node.op != "call_function" or any(nodes[item] not in variables for item in plan.node.all_input_nodes):
            return None
        args, kwargs = fx.node.map_arg((plan.node.args, plan.node.kwargs), lambda item: variables[nodes[item]])
        return args, kwargs

    def _deliver(self, problem: Problem) -> None:
        root, run = self, self
        while run._outer is not None:
            run._outer._wrong.add(run._owner.place[0])  # what the subgraph returns is wrong because of this
            root = run = run._outer
        key = (problem.subject, problem.mismatch.what)
        if key in root._seen:  # a loop's body runs many times
            return
        root._seen.add(key)
        finding = to_finding(problem)
        if root._owner.immediate:
            root._owner.on_findings((finding,))
        else:
            root.findings.append(finding)


def _is_custom(plan: NodePlan) -> bool:
    return not operator_name(plan.node).startswith("aten.")
