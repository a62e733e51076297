"""The results of judging the tensors of a walk, each by itself."""

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
    "Judged",
    "Wrong",
    "alike",
    "can_be_judged",
    "is_rounded_otherwise",
    "own_error",
    "roundoff_of",
]

COARSEST_FLOAT32 = 2.0**-13
"""The roundoff for float32 in a region of half precision, because of fast library functions and products in TF32."""

LOW = (torch.float16, torch.bfloat16)
"""Half precision."""

_JUDGED = (*LOW, torch.float32)

TOO_FEW = "too few of its elements can be told from a choice that rounding flips, or none is a number"
"""Why a tensor that differs from eager's could not be judged."""


@dataclass(frozen=True, slots=True)
class Wrong:
    """An operator with an error of its own.

    Attributes:
        node: The node whose value, or whose gradient, is wrong.
        error: By how much.
        found: The compiled program's tensor.
        right: What it should be, at the same precision.
        gradient: Whether it is the gradient: of those that read the node, one passes on a wrong one.
        output: The place of the region's result that is wrong, if it is not the tensor inside that it is made of.
    """

    node: fx.Node
    error: LocalError
    found: torch.Tensor
    right: torch.Tensor
    gradient: bool = False
    output: int | None = None


@dataclass(slots=True)
class Judged:
    """The facts known about a region's tensors so far.

    Attributes:
        wrong: Operators with an error of their own, in order.
        limits: For each tensor judged: the smallest relative error that would have been found. Forward, backward.
        unjudged: Nodes that could not be judged, with the reason.
    """

    wrong: list[Wrong] = field(default_factory=list)
    limits: tuple[dict[str, float], dict[str, float]] = field(default_factory=lambda: ({}, {}))
    unjudged: dict[str, str] = field(default_factory=dict)

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
            found: The compiled program's tensor.
            exact: What it should be, in float64.
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
        found: The compiled program's tensor.
        made: The same in each lane: eager's, that in float64, and those that are moved.
        roundoff: What eager may be off by.
        narrows: Whether what it is made of is wider.
        jumps: Whether a rounding of an input may change it by any amount.
        smooth: Whether none can, of any element.
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


def can_be_judged(value: Any) -> bool:
    """Whether something is a tensor of a dtype whose roundings are known."""
    return isinstance(value, torch.Tensor) and value.dtype in _JUDGED


def is_rounded_otherwise(value: Any) -> bool:
    """Whether a value is a rounded tensor of a dtype that is not judged: complex, 8 bits."""
    rounded = isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())
    return rounded and value.dtype not in (*_JUDGED, torch.float64, torch.complex128)


def roundoff_of(value: Any) -> float:
    """How far a rounding moves eager's value; 0 for a value that is not judged."""
    return max(unit_roundoff(value.dtype), COARSEST_FLOAT32) if can_be_judged(value) else 0.0


def alike(value: Any, found: Any) -> bool:
    """Whether both are tensors of one shape."""
    return isinstance(value, torch.Tensor) and isinstance(found, torch.Tensor) and value.shape == found.shape
