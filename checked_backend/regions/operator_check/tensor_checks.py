"""The results of checking the tensors of a walk, each by itself."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from checked_backend.numerics.bits import unit_roundoff
from checked_backend.numerics.measure import measure
from checked_backend.numerics.quick_diff import QuickDiff, quick_diffs
from checked_backend.regions.operator_check.recorder import is_unchanged
from checked_backend.verdict import thresholds
from checked_backend.verdict.envelope import NoiseBaseline
from checked_backend.verdict.local_error import LocalError, local_error

COARSEST_FLOAT32 = 2.0**-13
"""The roundoff for float32 in a region of half precision, because of fast library functions and products in TF32."""

ULPS_OF_FLOAT32 = 8.0
"""Library functions of float32 may be so many times as far off as a rounding, where float32 is checked for itself."""

LOW = (torch.float16, torch.bfloat16)
"""Half precision."""

LARGE_DISTANCE = 0.25
"""A tensor that is so far from eager's, relative to its own size, may be rounding and nothing else."""

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


TensorKey = tuple[str, bool, int | None]
"""A tensor: the name of its node, whether it is the node's gradient, and the place of the result that it is."""


@dataclass(slots=True)
class TensorChecks:
    """The facts known about a region's tensors so far.

    Attributes:
        wrong: Operators with an error of their own, in order.
        limits: For each tensor checked, the smallest relative error that would have been found: forward, backward.
        unchecked: Nodes that could not be checked, with the reason.
        earlier: Nodes that earlier walks could not check, with the reason.
        distances: How far each tensor was from eager's for the same inputs, in this walk and in earlier ones.
        quick: Whether tensors are only compared with eager's.
        different: Tensors that a quick walk found not to be equal to eager's.
        changed: Whether one of them is further from it than it was in earlier walks.
        drew: Nodes that drew random numbers.
        written: Whether a quick walk found that an operator writes to a tensor without saying so.
        only: The tensors that a walk has to check, because they are not equal to eager's; None for all.
    """

    wrong: list[Wrong] = field(default_factory=list)
    limits: tuple[dict[str, float], dict[str, float]] = field(default_factory=lambda: ({}, {}))
    unchecked: dict[str, str] = field(default_factory=dict)
    earlier: Mapping[str, str] = field(default_factory=dict)
    distances: dict[TensorKey, NoiseBaseline] = field(default_factory=dict)
    quick: bool = False
    different: set[TensorKey] = field(default_factory=set)
    changed: bool = False
    drew: set[str] = field(default_factory=set)
    written: bool = False
    only: Set[TensorKey] | None = None

    def of_nodes(self, names: Set[str]) -> TensorChecks:
        """What is known of some nodes."""
        forward, backward = ({name: one[name] for name in one.keys() & names} for one in self.limits)
        return replace(
            self,
            wrong=[one for one in self.wrong if one.node.name in names],
            limits=(forward, backward),
            unchecked={name: self.unchecked[name] for name in self.unchecked.keys() & names},
        )

    def settle(
        self,
        node: fx.Node,
        found: torch.Tensor,
        eager: torch.Tensor,
        *,
        gradient: bool = False,
        output: int | None = None,
    ) -> bool:
        """Compare a tensor with eager's, by the facts of `Wrong`. Returns whether that is all: in a quick walk."""
        key = node.name, gradient, output
        if self.quick and (is_unchanged(eager, found) or torch.equal(eager, found)):
            self.limits[gradient].setdefault(node.name, 0.0)  # nothing can hide in it
            return True
        [glance] = quick_diffs([(eager, found)])
        glance = glance or QuickDiff.of(measure(reference=eager.detach(), candidate=found.detach()))
        known = self.distances.get(key)
        if self.quick:
            self.different.add(key)
            self.changed |= known is None or glance is None or not known.covers(glance, slack=thresholds.DRAW_FACTOR)
        elif glance is not None:
            size = glance.reference_rms or 1.0
            sizes = (size, size) if glance.rmse > LARGE_DISTANCE * size else None
            distance = NoiseBaseline(glance.rmse / size, glance.max_abs_diff / size, sizes)
            self.distances[key] = distance.widened(known)
        return self.quick

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
        """Note the error of one tensor. The arguments are as in `Wrong`; ``exact`` is the right tensor, in float64."""
        limits = self.limits[gradient]
        limits[node.name] = max(error.limit, limits.get(node.name, 0.0))
        if error.wrong:
            right = exact.detach().to(found.dtype)
            self.wrong.append(Wrong(node, error, found.detach(), right, gradient=gradient, output=output))


NO_ERROR = LocalError(0.0, 1.0, 0.0, 1.0, 0.0, 0.0)
"""The error of a result that is eager's, bit for bit: nothing can hide in it."""


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

    It is right if it is what the operator makes of the tensors handed out, or of what these were before their rounding:
    where many roundings go the same way, no perturbed lane is as far off as either is from the other.

    Args:
        made: The tensor of each lane: eager's, that in float64, the perturbed ones, and the one of unrounded inputs.
        roundoff: How far eager may be off.
        narrows: Whether an input is wider than the result.
        jumps: Whether rounding an input may change the result by any amount.
        smooth: Whether rounding an input can make no element jump.
    """
    if torch.equal(found, made[0]):
        return NO_ERROR
    eager, exact, *samples, unrounded = (value.detach() for value in made)

    def error(moved: torch.Tensor | None) -> LocalError | None:
        return local_error(
            candidate=found.detach(),
            reference=eager if moved is None else (eager + moved).to(eager.dtype),
            exact=exact if moved is None else unrounded,
            samples=samples if moved is None else [value + moved for value in samples],
            roundoff=roundoff,
            narrows=narrows,
            jumps=jumps,
            smooth=smooth,
        )

    first, moved = error(None), unrounded - exact
    if first is None or not first.wrong or not bool(moved.any()) or not bool(moved.isfinite().all()):
        return first
    second = error(moved)
    return first if second is None or second.wrong else second


def exact_error(found: Any, made: Sequence[Any]) -> LocalError | None:
    """An error that no rounding makes: another shape or dtype, other integers, NaN and infinity where none belongs.

    Args:
        made: The value of each lane. Where the lanes are of several minds, rounding may choose.
    """
    eager = made[0]
    if not isinstance(found, torch.Tensor) or not isinstance(eager, torch.Tensor):
        return None
    if found.shape != eager.shape or found.dtype != eager.dtype or found.layout != eager.layout:
        return LocalError(math.inf, 1.0, 0.0, 1.0, math.inf, 0.0)
    floating = found.is_floating_point() or found.is_complex()
    given = (found, *(value for value in made if alike(value, eager)))
    own, expected, *others = (_class(value) if floating else value for value in given)
    differs = own != expected
    for value in others:
        differs &= value == expected
    count = int(differs.sum())
    if not count:
        return None
    size = float((own.double() - expected.double()).square().mean().sqrt())
    scale = float(expected.double().square().mean().sqrt())
    relative = math.inf if floating or not scale else size / scale
    return LocalError(math.inf, 1.0, 0.0, 1.0, relative, 0.0, outliers=count, worst=relative)


def _class(value: torch.Tensor) -> torch.Tensor:
    """0 for each finite element, and a number each for NaN and the two infinities."""
    return value.isnan() * 3 + value.isinf() * (2 if value.is_complex() else 1 + (value == math.inf))


def can_be_checked(value: Any, *, strict: bool = False) -> bool:
    """Whether something is a tensor of a dtype whose roundings are known.

    Args:
        strict: Whether float64 is checked, too: in units of float32's roundings.
    """
    return isinstance(value, torch.Tensor) and (value.dtype in _CHECKED or (strict and value.dtype is torch.float64))


def is_rounded_otherwise(value: Any) -> bool:
    """Whether a value is a rounded tensor of a dtype that is not checked: complex, 8 bits."""
    rounded = isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())
    return rounded and value.dtype not in (*_CHECKED, torch.float64, torch.complex128)


def roundoff_of(value: Any, *, strict: bool = False) -> float:
    """How far a rounding moves eager's value; 0 for a value that is not checked."""
    if not can_be_checked(value, strict=strict):
        return 0.0
    least = ULPS_OF_FLOAT32 * unit_roundoff(torch.float32) if strict else COARSEST_FLOAT32
    return max(unit_roundoff(value.dtype), least)


def alike(value: Any, found: Any) -> bool:
    """Whether both are tensors of one shape."""
    return isinstance(value, torch.Tensor) and isinstance(found, torch.Tensor) and value.shape == found.shape
