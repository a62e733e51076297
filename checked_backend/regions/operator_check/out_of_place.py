"""Write in-place writes of a region's graph as calls that make a new tensor, if that is the same program.

A tap before a write would change the tensor that is written to, and gradients that pass a write have no tensor at which
they can be seen. Most writes are an activation or a sum ``x += y``, which exist in both forms.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from checked_backend._torch.fake_tensors import FakeTensor
from checked_backend.graphs.effects import has_effects, mode_name
from checked_backend.graphs.nodes import recorded_value
from checked_backend.regions.compile import copy_graph
from checked_backend.regions.inputs import storage_key

# Autocast leaves all of these alone: where it casts, a new tensor would have another dtype than the one written to.
_SAME = frozenset(
    {
        "abs", "add", "addcdiv", "addcmul", "celu", "clamp", "clamp_max", "clamp_min", "div", "dropout", "elu",
        "feature_alpha_dropout", "hardsigmoid", "hardswish", "hardtanh", "leaky_relu", "masked_fill", "mish", "mul",
        "neg", "relu", "relu6", "rrelu", "selu", "sigmoid", "silu", "sqrt", "square", "sub", "tanh", "threshold",
    }
)  # fmt: skip
_OPERATORS: Mapping[Callable[..., Any], Callable[..., Any]] = {
    operator.iadd: operator.add,
    operator.isub: operator.sub,
    operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
}


def out_of_place(gm: fx.GraphModule) -> fx.GraphModule:
    """Copy a region's graph, with calls that make new tensors for writes in place; nodes keep their names.

    All writes to one tensor are replaced, or none: those to inputs, through views, under ``no_grad``, those that
    views made before would see, and functions of which only one spelling is known stay.
    """
    copied = copy_graph(gm)
    places = {node: place for place, node in enumerate(copied.graph.nodes)}
    for group in _by_memory(copied.graph.nodes):
        writers = [node for node in group if has_effects(node)]
        if any(_spelled(node) is None for node in writers) or not _only_seen_through(group, writers, places):
            continue
        former = [group[0]]
        for writer in writers:
            writer.target, writer.args, writer.kwargs = _spelled(writer) or (writer.target, writer.args, writer.kwargs)
            for node in former:
                node.replace_all_uses_with(writer, delete_user_cb=_behind(places, writer))
            writer.meta["example_value"] = _anew(recorded_value(writer))
            former.append(writer)
    copied.recompile()
    return copied


def _by_memory(nodes: Any) -> Iterator[list[fx.Node]]:
    """The nodes whose tensors share memory, in order, where a call made it and no write to it is hidden of autograd."""
    groups: dict[int, list[fx.Node]] = {}
    closed: set[int] = set()
    recording = True
    for node in nodes:
        name = mode_name(node)
        if name.startswith("_set_grad_enabled"):
            recording = bool(node.args[0])
        elif "inference" in name:
            return  # where that ends is not looked for
        value = recorded_value(node)
        key = storage_key(value) if isinstance(value, torch.Tensor) else None
        if key is None:
            continue
        groups.setdefault(key, []).append(node)
        if not recording and has_effects(node):
            closed.add(key)
    for key, group in groups.items():
        if key not in closed and group[0].op in ("call_function", "call_method"):
            yield group


def _only_seen_through(group: Sequence[fx.Node], writers: Sequence[fx.Node], places: Mapping[fx.Node, int]) -> bool:
    """Whether the writes are to the whole tensor, and nothing that a view of it was made for before reads it after."""
    whole = {group[0], *writers}
    if group[0] in writers or any(writer.args[0] not in whole for writer in writers):
        return False
    return not any(
        places[view] < places[writer] <= max((places[user] for user in view.users), default=0)
        for view in group
        if view not in whole
        for writer in writers
    )


def _behind(places: Mapping[fx.Node, int], writer: fx.Node) -> Callable[[fx.Node], bool]:
    return lambda user: places[user] > places[writer]


def _spelled(node: fx.Node) -> tuple[Any, tuple[Any, ...], dict[str, Any]] | None:
    """Target, arguments and keywords of the call that makes a new tensor; None if that may be another one."""
    if not node.args or not isinstance(node.args[0], fx.Node) or "out" in node.kwargs:
        return None
    own = recorded_value(node.args[0])
    others = [recorded_value(source) for source in node.all_input_nodes if source is not node.args[0]]
    if not isinstance(own, FakeTensor) or not own.is_floating_point() or not all(_keeps(own, one) for one in others):
        return None
    kwargs = dict(node.kwargs)
    if node.op == "call_method":
        name = str(node.target).removesuffix("_")
        return (name, node.args, kwargs) if name in _SAME else None
    if isinstance(node.target, str):
        return None
    if node.target in _OPERATORS:
        return _OPERATORS[node.target], node.args, kwargs
    name = str(getattr(node.target, "__name__", ""))
    if name.removesuffix("_") not in _SAME:
        return None
    if name.endswith("_"):
        homes = (torch, F, torch.Tensor)
        found = [getattr(home, name[:-1]) for home in homes if getattr(home, name, None) is node.target]
        return (found[0], node.args, kwargs) if found else None
    if "inplace" in kwargs:
        return node.target, node.args, {**kwargs, "inplace": False}
    place = list(inspect.signature(node.target).parameters).index("inplace")
    return node.target, (*node.args[:place], False, *node.args[place + 1 :]), kwargs


def _keeps(own: torch.Tensor, other: Any) -> bool:
    """Whether the result has the dtype of the first operand, as one that is written to has."""
    if not isinstance(other, torch.Tensor) or other.dtype == own.dtype:
        return True
    if other.is_complex():
        return False
    return not other.is_floating_point() or (other.dim() == 0 and own.dim() > 0)


def _anew(value: torch.Tensor) -> torch.Tensor:
    """A tensor like this in memory of its own."""
    with value.fake_mode, torch.no_grad():  # type: ignore[attr-defined]
        made = torch.empty_like(value)
    return made.requires_grad_(value.requires_grad)
