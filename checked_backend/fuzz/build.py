"""Make programs runnable: an FX graph module, which calls what the program names and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from checked_backend.fuzz.known import METHOD, operation
from checked_backend.fuzz.program import Constant, FuzzProgram, Ref, Size, Statement
from checked_backend.fuzz.values import make_inputs

__all__ = ["build", "inputs_for", "run_call", "run_eager"]


def build(programs: Sequence[FuzzProgram]) -> fx.GraphModule:
    """One module for several programs. It takes the inputs of all, and returns a tuple of results for each.

    Raises:
        FuzzError: A program calls what is not known.
    """
    graph = fx.Graph()
    values: list[list[fx.Node]] = []
    for number, program in enumerate(programs):
        prefix = f"p{number}_" if len(programs) > 1 else ""
        values.append([graph.placeholder(f"{prefix}x{place}") for place in range(len(program.inputs))])
    results = []
    for program, known in zip(programs, values, strict=True):
        for call in program.calls:
            known.append(_node(graph, call, known))
        results.append(tuple(known[place] for place in program.returns))
    graph.output(results[0] if len(programs) == 1 else tuple(results))
    return fx.GraphModule(torch.nn.Module(), graph)


def inputs_for(programs: Sequence[FuzzProgram]) -> tuple[torch.Tensor, ...]:
    """The inputs of the module that `build` makes."""
    return tuple(tensor for program in programs for tensor in make_inputs(program.inputs))


def _node(graph: fx.Graph, call: Statement, known: Sequence[fx.Node]) -> fx.Node:
    how, target = operation(call.op)
    args, kwargs = _nodes(call.args, graph, known), _nodes(dict(call.kwargs), graph, known)
    return graph.call_method(target, args, kwargs) if how == METHOD else graph.call_function(target, args, kwargs)


def _nodes(raw: Any, graph: fx.Graph, known: Sequence[fx.Node]) -> Any:
    match raw:
        case Ref(value):
            return known[value]
        case Size(value, dim):
            return graph.call_method("size", (known[value], dim))
        case Constant(name):
            return getattr(torch, name)
        case tuple():
            return tuple(_nodes(item, graph, known) for item in raw)
        case list():
            return [_nodes(item, graph, known) for item in raw]
        case dict():
            return {key: _nodes(item, graph, known) for key, item in raw.items()}
        case slice():
            return slice(*(_nodes(part, graph, known) for part in (raw.start, raw.stop, raw.step)))
    return raw


def run_call(call: Statement, known: Sequence[Any]) -> Any:
    """Run one call in eager.

    Args:
        call: The call.
        known: The values so far.

    Raises:
        Exception: Whatever torch raises.
    """
    how, target = operation(call.op)
    args, kwargs = _values(call.args, known), _values(dict(call.kwargs), known)
    if how == METHOD:
        return getattr(args[0], target)(*args[1:], **kwargs)
    return target(*args, **kwargs)


def run_eager(program: FuzzProgram) -> list[Any]:
    """Run a program in eager on fresh inputs, and return all of its values.

    Raises:
        Exception: Whatever torch raises.
    """
    known: list[Any] = list(make_inputs(program.inputs))
    for call in program.calls:
        known.append(run_call(call, known))
    return known


def _values(raw: Any, known: Sequence[Any]) -> Any:
    match raw:
        case Ref(value):
            return known[value]
        case Size(value, dim):
            return known[value].size(dim)
        case Constant(name):
            return getattr(torch, name)
        case tuple():
            return tuple(_values(item, known) for item in raw)
        case list():
            return [_values(item, known) for item in raw]
        case dict():
            return {key: _values(item, known) for key, item in raw.items()}
        case slice():
            return slice(*(_values(part, known) for part in (raw.start, raw.stop, raw.step)))
    return raw
