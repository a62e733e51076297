"""Find the calls of custom operators that compilation dropped.

AOT autograd removes a call whose result nobody takes and whose schema declares no write. If the operator does write, or
returns a number that the trace took from its fake kernel, the compiled program is wrong and no graph has a node to
compare. Such calls are found by comparing Dynamo's graph with AOT autograd's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from checked_backend._torch.operators import HigherOrderOperator, OpOverload, OpOverloadPacket, is_composite
from checked_backend._torch.tensors import is_traceable_wrapper_subclass
from checked_backend.findings import Skip
from checked_backend.graphs.effects import writes
from checked_backend.graphs.nodes import graph_fetched, recorded_value
from checked_backend.graphs.schema import is_built_in, wrapped_operator
from checked_backend.graphs.source_line import source_line
from checked_backend.metadata.steps import CheckSettings

Site = tuple[str, "str | None"]  # an operator, and the user's line that calls it


def operators_in(gm: fx.GraphModule) -> Counter[Site]:
    """The number of calls of each custom operator from each of the user's lines, in a graph and its inner graphs."""
    return Counter(site for node, _ in _calls(gm, inside=False) if (site := _site(node)) is not None)


def dropped_calls(dynamo: fx.GraphModule, compiled: Counter[Site], settings: CheckSettings) -> Iterator[Skip]:
    """Skips for the calls in Dynamo's graph that are missing from AOT autograd's.

    Each matters, for an operator may write what its schema does not declare; not so in a transform, whose rule may
    rightly have replaced it.

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
    for node, inside in _calls(dynamo, inside=False):
        site = _site(node)
        if site is None or (wanted[site] <= compiled[site] and node not in dead):
            continue
        if (inside or transformed) and site[0] in names:
            continue  # how often it is called there says nothing
        operator = _overloads(wrapped_operator(node) or node.target)[0]
        if settings.ignores(operator):
            continue
        schema = operator._schema
        why = "nothing takes its results"
        if inside:
            why = "it lies in a graph that a higher-order operator runs"
        elif transformed:
            why = "it lies in a transform of torch.func"
        elif not schema.returns and not schema.is_mutable:
            advice = "declare what it writes to, or its effect, or compiled code leaves it out"
            why = f"by its schema it does nothing: {advice}"
        line = f" at {site[1]}" if site[1] else ""
        reason = f"it is in no compiled graph ({why}), so that it was not compared with its schema and its fake kernel"
        yield Skip(f"the call of {site[0]}{line}", reason, matters=inside or not transformed)


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
