"""Find the calls of custom operators that compilation dropped, and make a graph that calls them alone.

AOT autograd removes a call whose result nobody takes and whose schema declares no write. If the operator does write, or
returns a number that the trace took from its fake kernel, the compiled program is wrong and no graph has a node to
compare. Such calls are found by comparing Dynamo's graph with AOT autograd's. A part of Dynamo's graph computes their
real arguments, and the calls get copies of those.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from checked_backend._torch.fake_tensors import FakeTensor
from checked_backend._torch.operators import HigherOrderOperator, OpOverload, OpOverloadPacket, is_composite
from checked_backend._torch.tensors import (
    clone_preserve_strides,
    is_functorch_wrapped_tensor,
    is_traceable_wrapper_subclass,
)
from checked_backend.findings import Finding, Skip
from checked_backend.graphs.effects import sets_mode, writes
from checked_backend.graphs.nodes import graph_fetched, recorded_value
from checked_backend.graphs.schema import is_built_in, wrapped_operator
from checked_backend.graphs.source_line import source_line
from checked_backend.metadata.interpreter import MetadataInterpreter
from checked_backend.metadata.reporter import MetadataReporter

_TRANSFORM = "a transform of torch.func"
Site = tuple[str, "str | None"]  # an operator, and the user's line that calls it
_Interpreters = Callable[[fx.GraphModule, Callable[[Sequence[Finding]], None]], MetadataInterpreter]


@dataclass(frozen=True, slots=True)
class Dropped:
    """A call that no compiled graph makes.

    Attributes:
        inside: The graph or transform that it lies in, so that it cannot be called alone; "" if it can.
        pointless: Whether, by its schema, it neither returns nor writes anything.
    """

    node: fx.Node
    operator: str
    inside: str
    pointless: bool

    def __str__(self) -> str:
        source = source_line(self.node)
        return f"the call of {self.operator}{f' at {source}' if source else ''}"


def operators_in(gm: fx.GraphModule) -> Counter[Site]:
    """The number of calls of each custom operator from each of the user's lines, in a graph and its inner graphs."""
    return Counter(site for node, _ in _calls(gm, inside=False) if (site := _site(node)) is not None)


def dropped_calls(dynamo: fx.GraphModule, compiled: Counter[Site]) -> list[Dropped]:
    """The calls in Dynamo's graph that are missing from AOT autograd's.

    Args:
        compiled: The result of `operators_in` for AOT autograd's joint graph, or for its inference graph.
    """
    wanted = operators_in(dynamo)
    names = {name for name, _ in compiled}
    inputs = (recorded_value(node) for node in dynamo.graph.find_nodes(op="placeholder"))
    # of tensors that wrap others, AOT autograd's graph has a call for each wrapped tensor
    wrapped = any(isinstance(value, torch.Tensor) and is_traceable_wrapper_subclass(value) for value in inputs)
    dead = _dead(dynamo.graph) if wrapped else set()
    # in the compiled graph, torch.vmap and torch.func.grad call whatever the operator's rule calls
    transformed = any("_increment_nesting" in str(node.target) for node in dynamo.graph.nodes)
    found = []
    for node, inside in _calls(dynamo, inside=False):
        site = _site(node)
        if site is None or (wanted[site] <= compiled[site] and node not in dead):
            continue
        if (inside or transformed) and site[0] in names:
            continue  # how often it is called there says nothing
        schema = _overloads(node.target)[0]._schema
        place = "a graph that a higher-order operator runs" if inside else _TRANSFORM if transformed else ""
        found.append(Dropped(node, site[0], place, pointless=not schema.returns and not schema.is_mutable))
    return found


def _dead(graph: fx.Graph) -> set[fx.Node]:
    """Calls that write to nothing, and whose results reach no output and no call that writes."""
    found: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node.op == "call_function" and not _writes(node) and all(user in found for user in node.users):
            found.add(node)
    return found


def _writes(node: fx.Node) -> bool:
    return writes(node) or any(overload._schema.is_mutable for overload in _overloads(node.target))


def _calls(gm: fx.GraphModule, *, inside: bool) -> Iterator[tuple[fx.Node, bool]]:
    for node in gm.graph.nodes:
        if node.op == "call_function":
            yield node, inside
            # the second graph of an autograd.Function is its backward, which an inference graph does not have
            bodies = node.args[:1] if "autograd_function" in str(node.target) else (*node.args, *node.kwargs.values())
            given: list[fx.Node] = []
            fx.node.map_arg(tuple(bodies), given.append)
            for item in given if isinstance(node.target, HigherOrderOperator) else ():
                if (body := graph_fetched(gm, item)) is not None:
                    yield from _calls(body, inside=True)


def _overloads(target: Any) -> list[OpOverload]:
    if isinstance(target, OpOverload):
        return [target]
    return [getattr(target, name) for name in target.overloads()] if isinstance(target, OpOverloadPacket) else []


def _site(node: fx.Node) -> Site | None:
    """The name of a custom operator and the line that calls it; None for any other call."""
    overloads = _overloads(wrapped_operator(node) or node.target)
    if not overloads or is_built_in(overloads[0]) or any(map(is_composite, overloads)):
        return None  # the graph has the parts of a composite operator, not the operator itself
    return overloads[0]._schema.name.replace("::", "."), source_line(node)


def _calls_alone(dynamo: fx.GraphModule, calls: Sequence[Dropped]) -> tuple[fx.GraphModule, set[str]]:
    """The part of Dynamo's graph that makes these calls, each on copies of its arguments.

    Args:
        dynamo: Dynamo's graph; it stays as it is.
        calls: Calls in it, none inside of a higher-order operator's graph.

    Returns:
        The part, which takes the same inputs and returns nothing, and the names of the calls in it.

    Raises:
        ValueError: The part cannot be run a second time. The message gives the reason.
    """
    targets = {call.node for call in calls}
    needed = _needed(dynamo.graph, targets)
    graph = fx.Graph()
    copied: dict[fx.Node, fx.Node] = {}
    rewrites = any(map(_writes, needed))
    names = set()
    for node in dynamo.graph.nodes:
        if node.op == "output":
            graph.output(())
        elif node.op == "placeholder" or node in needed:
            if node in targets:
                # a call that writes gets the originals, because the calls after it must see what it wrote
                apart = [] if _writes(node) else node.all_input_nodes
                copies = copied | {item: graph.call_function(_copy, (copied[item],)) for item in apart}
                copied[node] = graph.node_copy(node, copies.__getitem__)
                [copied[node].target, *others] = _overloads(node.target)
                if others:
                    raise ValueError(f"{node.target} has several overloads")
                names.add(copied[node].name)
            else:
                copied[node] = graph.node_copy(node, copied.__getitem__)
            if node.op == "placeholder" and rewrites and node in needed:
                copied[node] = graph.call_function(_copy, (copied[node],))
    return fx.GraphModule(dynamo, graph), names


def _needed(graph: fx.Graph, targets: set[fx.Node]) -> set[fx.Node]:
    """The nodes that the calls depend on: by their arguments, by writes, and by modes such as autocast."""
    nodes = list(graph.nodes)
    last = max(map(nodes.index, targets))
    needed: set[fx.Node] = set()
    waiting = [*targets, *(node for node in nodes[:last] if _writes(node)), *filter(sets_mode, nodes)]
    while waiting:
        node = waiting.pop()
        if node in needed:
            continue
        if isinstance(node.target, (OpOverload, OpOverloadPacket)) and "c10d" in str(node.target):
            raise ValueError("it depends on a collective operation, which all processes would have to run once more")
        needed.add(node)
        waiting.extend(node.all_input_nodes)
    return needed


def _copy(value: Any) -> Any:
    """A copy of a tensor with the same layout; any other value itself."""
    if not isinstance(value, torch.Tensor):
        return value
    if type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided and not value.is_nested:
        return clone_preserve_strides(value.detach())
    return value.detach().clone()


class DroppedCallCheck:
    """Checks the calls of one region that no compiled graph makes. It makes each once, alone, and watches its operator.

    Args:
        dropped: The calls in it that are missing from the compiled graphs.
    """

    def __init__(
        self, dynamo: fx.GraphModule, dropped: Sequence[Dropped], interpreter: _Interpreters, reporter: MetadataReporter
    ) -> None:
        self._lock = threading.Lock()
        self._reporter = reporter
        self._ran = False
        self._found: list[Finding] = []
        self._calls = [call for call in dropped if not call.inside]
        self._skips = [_skip(call, f"it lies in {call.inside}") for call in dropped if call.inside]
        self._interpreter: MetadataInterpreter | None = None
        self._names: set[str] = set()
        if self._calls:
            try:
                part, self._names = _calls_alone(dynamo, self._calls)
                self._interpreter = interpreter(part, self._found.extend)
            except Exception as error:
                self._fail(str(error))

    def check(self, args: Sequence[Any]) -> None:
        """Check at the first call. Report the findings and the unchecked calls at every call.

        Args:
            args: The region's real inputs; they are not changed.

        Raises:
            MetadataError: With ``on_divergence="raise"``.
        """
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        if any(isinstance(tensor, FakeTensor) or is_functorch_wrapped_tensor(tensor) for tensor in tensors):
            return  # another tracer traces the region
        with self._lock:
            if not self._ran:
                self._run(args)
        if self._calls:
            self._reporter.count({"calls that compilation dropped": len(self._calls)})
        for call in self._calls:
            self._reporter.note(_note(call))
        for skip in self._skips:
            self._reporter.skip(skip)
        self._reporter.report(self._found)

    def _run(self, args: Sequence[Any]) -> None:
        self._ran = True
        interpreter, self._interpreter = self._interpreter, None
        if interpreter is None:
            return
        devices = {arg.device.index for arg in args if isinstance(arg, torch.Tensor) and arg.is_cuda}
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=sorted(devices)):
                interpreter(list(args))
        except Exception as error:
            self._fail(f"{type(error).__name__}: {error}")
        told = [f for f in self._found if f.node in self._names and not f.inherited]
        self._found = [
            replace(finding, message=f"{finding.message}\n    compilation dropped this call: nothing takes its results")
            for finding in told
        ]

    def _fail(self, why: str) -> None:
        self._skips += [_skip(call, why) for call in self._calls]
        self._calls = []


def _skip(call: Dropped, why: str) -> Skip:
    # a transform's rule may rightly have replaced the operator
    matters = call.inside != _TRANSFORM
    return Skip(str(call), f"it is in no compiled graph, and it could not be made alone: {why}", matters=matters)


def _note(call: Dropped) -> str:
    text = f"{call} is in no compiled graph, for nothing takes its results; it was made once, alone, on copies"
    advice = "; by its schema it does nothing: declare what it writes to, or its effect, or compiled code leaves it out"
    return text + advice if call.pointless else text
