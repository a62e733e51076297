"""The results of checking the tensors of a walk, each by itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from checked_backend.numerics.bits import unit_roundoff
from checked_backend.verdict.local_error import LocalError, local_error

__all__ = [
    "COARSEST_FLOAT32",
    "LOW",
    "TOO_FEW",
    "TensorChecks",
    "Wrong",
    "alike",
    "can_be_checked",
    "is_rounded_otherwise",
    "own_error",
    "roundoff_of",
]

COARSEST_FLOAT32 = 2.0**-13
"""The roundoff for float32 in a region of half precision, because of fast library functions and products in TF32."""

LOW = (torch.float16, torch.bfloat16)
"""Half precision."""

_CHECKED = (*LOW, torch.float32)

TOO_FEW = "too few of its elements can be told from a choice that rounding flips, or none is a number"
"""Why a tensor that differs from eager's could not be checked."""


@dataclass(frozen=True, slots=True)
class Wrong:
    """An operator with an error of its own.

    Attributes:
        node: The node whose value, or whose gradient, is wrong.
        error: How far it is off.
        found: The compiled program's tensor.
        right: The right tensor, at the same precision.
        gradient: Whether the gradient is wrong: one of the node's readers passes on a wrong one.
        output: The place of the region's result that is wrong, if it is not the tensor inside that it is made of.
        operator: The node of the faulty operator, where the kernel that ran tells it.
    """

    node: fx.Node
    error: LocalError
    found: torch.Tensor
    right: torch.Tensor
    gradient: bool = False
    output: int | None = None
    operator: fx.Node | None = None


@dataclass(slots=True)
class TensorChecks:
    """The facts known about a region's tensors so far.

    Attributes:
        wrong: Operators with an error of their own, in order.
        limits: For each tensor checked, the smallest relative error that would have been found: forward, backward.
        unchecked: Nodes that could not be checked, with the reason.
    """

    wrong: list[Wrong] = field(default_factory=list)
    limits: tuple[dict[str, float], dict[str, float]] = field(default_factory=lambda: ({}, {}))
    unchecked: dict[str, str] = field(default_factory=dict)

    def note(
        self,
        node: fx.Node,
        error: LocalError,
        found: torch.Tensor,
        exact: torch.Tensor,
        *,
        gradient: bool = False,
        output: int | None = None,
    ) -> None:
        """Note the error of one tensor.

        Args:
            node: The node whose value it is.
            error: How far it is off, and how far it may be.
            exact: The right tensor, in float64.
            gradient: Whether it is the gradient of the node's value.
            output: As in `Wrong`.
        """
        limits = self.limits[gradient]
        limits[node.name] = max(error.limit, limits.get(node.name, 0.0))
        if error.wrong:
            right = exact.detach().to(found.dtype)
            self.wrong.append(Wrong(node, error, found.detach(), right, gradient=gradient, output=output))


def own_error(
    found: torch.Tensor,
    made: Sequence[torch.Tensor],
    *,
    roundoff: float,
    narrows: bool,
    jumps: bool,
    smooth: bool,
) -> LocalError | None:
    """The error of an operator by itself; the arguments are those of `local_error`.

    Args:
        made: The tensor of each lane: eager's, that in float64, and the perturbed ones.
        roundoff: How far eager may be off.
        narrows: Whether an input is wider than the result.
        jumps: Whether rounding an input may change the result by any amount.
        smooth: Whether rounding an input can make no element jump.
    """
    return local_error(
        candidate=found.detach(),
        reference=made[0].detach(),
        exact=made[1].detach(),
        samples=[value.detach() for value in made[2:]],
        roundoff=roundoff,
        narrows=narrows,
        jumps=jumps,
        smooth=smooth,
    )


def can_be_checked(value: Any) -> bool:
    """Whether something is a tensor of a dtype whose roundings are known."""
    return isinstance(value, torch.Tensor) and value.dtype in _CHECKED


def is_rounded_otherwise(value: Any) -> bool:
    """Whether a value is a rounded tensor of a dtype that is not checked: complex, 8 bits."""
    rounded = isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())
    return rounded and value.dtype not in (*_CHECKED, torch.float64, torch.complex128)


def roundoff_of(value: Any) -> float:
    """How far a rounding moves eager's value; 0 for a value that is not checked."""
    return max(unit_roundoff(value.dtype), COARSEST_FLOAT32) if can_be_checked(value) else 0.0


def alike(value: Any, found: Any) -> bool:
    """Whether both are tensors of one shape."""
    return isinstance(value, torch.Tensor) and isinstance(found, torch.Tensor) and value.shape == found.shape
