"""Find writes with an undefined result: several values go to one place, and any of them may stay."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from checked_backend._torch.modes import OperatorWatch
from checked_backend.diagnose.reduce.failing_case import FailingCase
from checked_backend.regions.inputs import copy_values

_NAMES = ("index_put", "scatter", "index_copy", "setitem", "put_")


def has_race(program: FailingCase) -> bool:
    """Whether eager, on this program's inputs, writes different values to one place in one call.

    The result of such a call depends on the order of its writes. Torch promises no order, so a compiled program may
    rightly differ. If eager raises, what was seen so far counts.
    """
    if not any(map(_may_race, program.case.graph.graph.nodes)):
        return False
    found = False

    def look(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal found
        written = _WRITES.get((func._schema.name.partition("::")[2].strip("_"), func._schema.overload_name))
        found = found or (written is not None and written(*args, **kwargs))

    with contextlib.suppress(Exception), torch.no_grad(), torch.random.fork_rng(devices=[]), OperatorWatch(look):
        program.case.graph(*copy_values(program.case.inputs))
    return found


def _may_race(node: fx.Node) -> bool:
    if node.op == "get_attr":  # the body of control flow
        return True
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    return node.op.startswith("call_") and any(part in name for part in _NAMES)


def _differ(where: torch.Tensor, values: torch.Tensor) -> bool:
    """Whether one place is given several values.

    Args:
        where: The place of each value, as one number or as a row of numbers.
    """
    _, group = torch.unique(where, dim=0, return_inverse=True)
    order = group.argsort(stable=True)
    group, values = group[order], values[order]
    # in a group with different values, some neighbours differ
    other = (values[1:] != values[:-1]).reshape(len(values) - 1, -1).any(1) if len(values) > 1 else values.new_empty(0)
    return bool(((group[1:] == group[:-1]) & other.bool()).any())


def _index_put(
    x: torch.Tensor, places: Sequence[Any], values: torch.Tensor, accumulate: bool = False, _unsafe: bool = False
) -> bool:
    if accumulate or values.numel() == 1:
        return False
    numbers = torch.arange(x.numel(), device=x.device).reshape(x.shape)
    written = torch.ops.aten.index.Tensor(numbers, list(places))
    return _differ(written.reshape(-1), values.expand(written.shape).reshape(-1))


def _scatter(x: torch.Tensor, dim: int, index: torch.Tensor, src: torch.Tensor) -> bool:
    if not x.dim() or not index.numel():
        return False
    numbers = torch.arange(x.numel(), device=x.device).reshape(x.shape)
    part = numbers[tuple(slice(0, size) if at != dim % x.dim() else slice(None) for at, size in enumerate(index.shape))]
    values = src[tuple(slice(0, size) for size in index.shape)]
    return _differ(part.gather(dim, index).reshape(-1), values.reshape(-1))


_WRITES: Mapping[tuple[str, str], Callable[..., bool]] = MappingProxyType(
    {
        **dict.fromkeys((("index_put", ""), ("unsafe_index_put", ""), ("index_put_impl", "")), _index_put),
        ("scatter", "src"): _scatter,
        ("index_copy", ""): lambda x, dim, index, source: (
            x.dim() > 0 and _differ(index.reshape(-1), source.movedim(dim, 0))
        ),
        ("put", ""): lambda x, index, source, accumulate=False: (
            not accumulate and _differ(index.remainder(x.numel()).reshape(-1), source.reshape(-1))
        ),
    }
)
