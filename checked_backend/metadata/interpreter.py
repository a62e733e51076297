"""Run a graph and compare every real value with the metadata recorded for it."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from checked_backend._torch.operators import HigherOrderOperator
from checked_backend.errors import MetadataError
from checked_backend.findings import Finding
from checked_backend.graphs.nodes import graph_fetched
from checked_backend.graphs.schema import is_custom, operator_name
from checked_backend.metadata.run import GraphRun, History
from checked_backend.metadata.steps import CheckSettings, GraphSteps, prepare

_UNDER_VMAP = frozenset({"flex_attention", "flex_attention_backward", "associative_scan"})
_PLAIN = (torch.Tensor, torch.nn.Parameter, int, float, bool, type(None), torch.Generator)


class MetadataInterpreter:
    """Checks one graph on every run.

    The constructor reads the graph once, into prepared steps. A run only compares plain numbers.

    Args:
        gm: An AOT graph, or any graph whose nodes carry ``meta["val"]``.
        on_findings: Receives the findings of a run, in graph order. An exception that it raises ends the run.
        history: The facts from graphs that ran before this one. This graph adds its own.

    ``on_findings`` also receives the findings that the user ignores, and those that only follow from them. Their
    evidence has the entry of the option, as ``ignored``.

    Attributes:
        position: That of the node, in the graph around this one, which fetches this graph.
        place: The place of an inner graph, from the inside to the outside; "" for an outermost graph.
        checked_nodes: How many nodes are compared.
        asserts: How many assumptions about sizes that depend on data are checked.
        unchecked: How many nodes are not compared, or not wholly, by reason.
    """

    def __init__(
        self,
        gm: fx.GraphModule,
        kind: str,
        on_findings: Callable[[Sequence[Finding]], None],
        settings: CheckSettings | None = None,
        history: History | None = None,
        *,
        _parent: MetadataInterpreter | None = None,
        _place: tuple[int, str] = (0, ""),
    ) -> None:
        self.kind = kind
        self.on_findings = on_findings
        self.settings = settings or CheckSettings()
        self.position, words = _place
        around = f", in {_parent.place}" if _parent is not None and _parent.place else ""
        self.place: str = f"{words}{around}"
        self.history = History() if history is None else history
        self.running: _Running = _Running() if _parent is None else _parent.running
        self._original = gm.forward
        children = self._children(gm)
        self.graph: GraphSteps = prepare(gm, self.settings, {node: child.module for node, child in children.items()})
        steps = self.graph.steps
        self.asserts: int = len(self.graph.asserts) + sum(child.asserts for child in children.values())
        self.checked_nodes: int = sum(step.compared for step in steps)
        self.checked_nodes += sum(child.checked_nodes for child in children.values())
        self.unchecked: Counter[str] = Counter(self._unchecked())
        for child in children.values():
            self.unchecked += child.unchecked
        self._inputs = [step.node.name for step in steps if step.node.op == "placeholder"]
        self._watches: bool = any(is_custom(step.node) for step in steps)
        self._watches = self._watches or any(child._watches for child in children.values())
        self.module: fx.GraphModule = gm
        if _parent is not None:  # a module that checks itself, for a higher-order operator to run
            self.module = fx.GraphModule(gm, gm.graph)
            self.module.forward = self._run_within

    def _unchecked(self) -> Iterator[str]:
        """The reason for each node that is not compared, or not wholly."""
        yield from ["no metadata was recorded"] * self.graph.unchecked
        for step in self.graph.steps:
            if step.leaves is not None and (entry := self.settings.ignores(step.node)):
                yield f"ignore_ops names {entry}"
            elif step.compared and self.settings.light:
                yield "they run under vmap, where only dtypes and shapes can be compared"

    def _children(self, gm: fx.GraphModule) -> dict[fx.Node, MetadataInterpreter]:
        """One interpreter for each graph that a higher-order operator is given."""
        children = {}
        for position, node in enumerate(gm.graph.nodes):
            users = [user for user in node.users if isinstance(user.target, HigherOrderOperator)]
            graph = graph_fetched(gm, node)
            if graph is None or not users:
                continue
            user = users[0]
            children[node] = MetadataInterpreter(
                graph,
                self.kind,
                self.on_findings,
                replace(self.settings, light=self.settings.light or operator_name(user) in _UNDER_VMAP),
                self.history,
                _parent=self,
                _place=(position, f"{node.target} of {operator_name(user)}"),
            )
        return children

    def _run_within(self, *args: Any) -> Any:
        outer = self.running.run
        plain = self.settings.light or all(type(arg) in _PLAIN for arg in args)
        if outer is None or not plain:
            return self._original(*args)  # torch traces the graph anew, for example to differentiate it
        return GraphRun(self, outer).run(list(args))

    def __call__(self, args: list[Any]) -> Any:
        """Run the graph on a list of inputs, which is emptied (the boxed convention)."""
        run = GraphRun(self, None)
        if self._watches and "alias" in self.settings.checks:
            # for the operators that are watched; each is still freed after its last use
            self.history.memory.note(
                (arg, f"the memory of the graph's input {name}, which it is not given")
                for name, arg in zip(self._inputs, args, strict=False)
                if isinstance(arg, torch.Tensor)
            )
        before, self.running.run = self.running.run, run
        try:
            result = run.run(args)
        except MetadataError:
            raise
        except Exception as error:
            # an operator often fails because of an earlier mismatch, whose message helps more
            try:
                run.tell()
            except MetadataError as mismatch:
                raise mismatch from error
            raise
        finally:
            self.running.run = before
        run.tell()
        return result


class _Running(threading.local):
    """The run that this thread is in, for graphs inside of the graph."""

    run: GraphRun | None = None
