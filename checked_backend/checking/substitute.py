"""A program's call with other values for some of its arguments."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from typing import Any

import torch

from checked_backend.checking.program import Program, ProgramCall
from checked_backend.checking.tree import argument_leaves

__all__ = ["substituted"]


def substituted(program: Program, new: Mapping[str, Any], label: str) -> ProgramCall | None:
    """The program's own call with other values.

    Args:
        program: The program whose first call is changed.
        new: New values by the names of `argument_leaves`. Tensors may be anywhere, other values only be arguments
            themselves.
        label: How the new call differs from the user's own.

    Returns:
        The call; None if nothing could be substituted, or containers of the arguments cannot be copied.
    """
    call = program.calls[0]
    leaves = dict(argument_leaves(program.function, call.args, call.kwargs))
    memo = {id(leaf): leaf for leaf in leaves.values() if isinstance(leaf, (torch.Tensor, torch.nn.Module))}
    memo |= {id(leaves[name]): value for name, value in new.items() if isinstance(leaves[name], torch.Tensor)}
    try:
        args, kwargs = copy.deepcopy((list(call.args), dict(call.kwargs)), dict(memo))
    except Exception:  # the check itself has copied them, so this is about an object without tensors
        return None
    values = {name: value for name, value in new.items() if not isinstance(leaves[name], torch.Tensor)}
    if values and not _set_arguments(program, args, kwargs, values):
        return None
    return ProgramCall(args, kwargs, label) if new else None


def _set_arguments(program: Program, args: list[Any], kwargs: dict[str, Any], values: Mapping[str, Any]) -> bool:
    target: Any = program.function.forward if isinstance(program.function, torch.nn.Module) else program.function
    try:
        positions = list(inspect.signature(target).parameters)
    except (TypeError, ValueError):
        return False
    for name, value in values.items():
        if name in kwargs:
            kwargs[name] = value
        elif name in positions[: len(args)]:
            args[positions.index(name)] = value
        else:
            return False
    return True
