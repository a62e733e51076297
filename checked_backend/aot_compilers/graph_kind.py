"""The kind of a graph that AOT autograd hands to a compiler, and the names of its inputs and outputs for people."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from checked_backend.dump.region import saved_activations
from checked_backend.graphs.nodes import outputs_of
from checked_backend.regions.graph_info import GraphInfo
from checked_backend.subjects import Subject, SubjectKind

_PLACE = re.compile(r"idx=(\d+)")

_FREE = (SubjectKind.GRADIENT, SubjectKind.SAVED)


def graph_kind(gm: fx.GraphModule) -> str:
    """``backward``, ``forward``, or ``inference`` for a graph that saves nothing for a backward graph."""
    if any(node.name.startswith("tangents_") for node in gm.graph.find_nodes(op="placeholder")):
        return "backward"
    return "forward" if saved_activations(gm, "forward") else "inference"


def user_outputs(gm: fx.GraphModule) -> list[int]:
    """Positions of the outputs of a forward or inference graph that the user gets."""
    values, descriptions = _outputs(gm)
    return [
        index
        for index, value in enumerate(values)
        if isinstance(value, fx.Node) and not _is(descriptions[index], "SavedForBackwards")
    ]


def graph_info(gm: fx.GraphModule, index: int) -> GraphInfo:
    """Names of an AOT graph's parts.

    Args:
        index: Its number among the graphs that its compiler received.

    Returns:
        The names: ``output[0]``, ``saved[relu]`` for a value that a forward graph saves, ``grad[primals_1]`` for a
        gradient that a backward graph returns.
    """
    kind = graph_kind(gm)
    info = GraphInfo.of(gm)
    values, descriptions = _outputs(gm)
    names = [_output_name(kind, *pair, info.inputs) for pair in zip(values, descriptions, strict=True)]
    return replace(
        info,
        name=f"{info.name}, {kind} graph {index}",
        graph=kind,
        outputs=tuple(name or f"output[{place}]" for place, name in enumerate(names)),
        free_outputs=frozenset(place for place, name in enumerate(names) if Subject(name).kind in _FREE),
    )


def _outputs(gm: fx.GraphModule) -> tuple[Sequence[Any], Sequence[Any]]:
    (output,) = gm.graph.find_nodes(op="output")
    values = outputs_of(gm.graph)
    descriptions = list(output.meta.get("desc") or ())
    return values, [*descriptions, *([None] * (len(values) - len(descriptions)))]


def _is(description: object, kind: str) -> bool:
    return type(description).__name__.startswith(kind)


def _output_name(kind: str, value: Any, description: Any, inputs: Sequence[str]) -> str:
    if _is(description, "SavedForBackwards") and isinstance(value, fx.Node):
        return f"saved[{value.name}]"
    if _is(description, "Plain"):
        return f"output[{description.idx}]"
    if _is(description, "InputMutation"):
        return f"mutated[{_input_name(description.mutated_input)}]"
    if _is(description, "Grad"):
        return f"grad[{_input_name(description.grad_of)}]"
    return ""


def _input_name(description: Any) -> str:
    """A parameter's own name if AOT autograd knows it, else the placeholder's name in the forward graph."""
    target = getattr(description, "target", None)
    if target:
        return str(target)
    place = _PLACE.search(repr(description))
    return f"primals_{int(place[1]) + 1}" if place else str(description)
