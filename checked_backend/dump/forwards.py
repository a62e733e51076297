"""Check a backward operator of a graph against the forward operator of the same name, by shapes alone."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from checked_backend._torch.operators import OpOverload, find_op_packet, is_writing_out

__all__ = ["forward_problem", "out_problem"]

# kernels that take their loops from one tensor, and their memory from another
_FAMILIES = re.compile(
    r"aten::(\w*pad\dd|\w*pool\w*|upsample_\w+|grid_sampler_\dd|\w*nll_loss\w*|multi\w*_margin_loss|glu)_backward"
)


def forward_problem(name: str, given: Mapping[str, Any]) -> str | None:
    """Why the gradient for a backward operator does not fit its forward operator's result; None if it fits.

    Args:
        name: ``namespace::name``.
        given: Its arguments by name.
    """
    found = _FAMILIES.fullmatch(name)
    packet = find_op_packet("aten", found[1]) if found else None
    forward = getattr(packet, "default", None)
    gradient = given.get("grad_output")
    if not isinstance(forward, OpOverload) or not isinstance(gradient, torch.Tensor):
        return None
    arguments = {one.name: given.get(one.name, one.default_value) for one in forward._schema.arguments}
    if any(one.name not in given and not one.has_default_value() for one in forward._schema.arguments):
        return None
    try:
        result = forward(**{key: _without_memory(value) for key, value in arguments.items()})
    except NotImplementedError:
        return None
    except (RuntimeError, IndexError, ValueError, TypeError) as error:
        first = (str(error).strip().splitlines() or [""])[0]
        return f"{found[1] if found else name} does not take what it is given back: {first[:200]}"
    expected = result[0] if isinstance(result, (tuple, list)) else result
    if tuple(expected.shape) != tuple(gradient.shape):
        return f"grad_output is of shape {tuple(gradient.shape)}, not {tuple(expected.shape)}"
    return None


def out_problem(overload: OpOverload) -> str | None:
    """Why an operator may not write to its ``out`` argument; None if it may.

    Public operators resize ``out`` and check it. Some operators that only other operators call do not. No traced graph
    makes these write to ``out``.
    """
    name = overload.name().partition("::")[2].partition(".")[0]
    inner = name.startswith("_") or "_backward" in name or name in ("rrelu_with_noise", "nanmedian")
    return "it may not be told where to write" if inner and is_writing_out(overload) else None


def _without_memory(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    if isinstance(value, (list, tuple)):
        return [_without_memory(one) for one in value]
    return value
