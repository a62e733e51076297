"""Check one operator by itself: given the compiled program's own inputs, is the compiled program's result right?

An operator whose inputs are wrong rightly gives a wrong result: that error is *inherited*. An operator has a *local*
error if no rounding explains its result for its own inputs; it is the faulty one. Its noise is that of one operator,
with inputs that a fused kernel may never have rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from checked_backend._torch.pytree import tree_flatten, tree_map, tree_unflatten
from checked_backend.errors import CheckedBackendError
from checked_backend.findings import Finding, Kind
from checked_backend.modes.float64 import Float64Mode, to_float64
from checked_backend.modes.monte_carlo import MonteCarloMode, PoisonMode
from checked_backend.modes.noise_source import NoiseSource
from checked_backend.numerics.bits import unit_roundoff
from checked_backend.regions.compare_parts import Part, compare_parts
from checked_backend.verdict.control_runs import Control, Values
from checked_backend.verdict.decide import decide
from checked_backend.verdict.decisions import TensorPair

__all__ = ["LAYOUT", "OperatorCall", "call_oracle"]

LAYOUT = frozenset({"structure.stride", "structure.requires_grad"})
"""Details that neither cause wrong values nor are caused by them: a compiler may choose them inside a graph."""


@dataclass(frozen=True, slots=True)
class OperatorCall:
    """One operator call of a graph.

    Attributes:
        args: Its arguments, as the compiled program computed them.
        exact: The ids of tensors that are inputs of the graph, which a kernel gets without rounding.
    """

    node: fx.Node
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    run: Callable[..., Any]
    exact: frozenset[int] = frozenset()

    def __call__(self) -> Any:
        """Run it in eager."""
        return self.run(*self.args, **self.kwargs)


class ControlError(CheckedBackendError):
    """Raised for a control run that one operator call cannot have."""


@dataclass(frozen=True, slots=True)
class _CallControls:
    """Control runs of one operator call."""

    call: OperatorCall

    def repeat(self, junk: int = 1) -> Values:
        with PoisonMode(junk):
            return values_of(self.call())

    def bare(self) -> Values:
        return values_of(self.call())

    def replay_candidate(self) -> Values:
        raise ControlError("one operator is not compiled by itself here")

    def rerun_candidate(self) -> Values:
        raise ControlError("one operator is not compiled by itself here")

    def reseeded(self, seed: int) -> Values:
        raise ControlError("one operator is not compiled by itself here")

    def others_drew(self) -> str | None:
        raise ControlError("one operator is not compiled by itself here")

    def monte_carlo(self, seed: int, magnitude: float, *, replay_choices: bool = False) -> Values:
        del replay_choices  # the operator may do nothing but choose
        noise = NoiseSource(seed)

        def perturbed(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or id(value) in self.call.exact or not _rounds(value):
                return value
            copy = value.clone()
            noise.perturb_(copy, magnitude * unit_roundoff(value.dtype))
            return copy

        args, kwargs = tree_map(perturbed, (self.call.args, dict(self.call.kwargs)))
        with MonteCarloMode(seed, magnitude, correlated=magnitude > 1):
            return values_of(self.call.run(*args, **kwargs))

    def high_precision(self, seed: int | None, *, magnitude: float = 1.0, replay_choices: bool = False) -> Values:
        del replay_choices
        leaves, spec = tree_flatten((self.call.args, dict(self.call.kwargs)))
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        for place, wide in zip(places, to_float64([leaves[place] for place in places]), strict=True):
            leaves[place] = wide
        args, kwargs = tree_unflatten(leaves, spec)
        with Float64Mode(default_dtype=False):
            if seed is None:
                return values_of(self.call.run(*args, **kwargs))
            with MonteCarloMode(seed, magnitude, correlated=True):
                return values_of(self.call.run(*args, **kwargs))

    def one_zero(self, *, negative: bool) -> Values:
        del negative
        raise ControlError("the sign of a zero is not compared here")

    def draws(self) -> bool:
        return False

    def draws_by_values(self) -> tuple[str, ...]:
        return ()

    def left_out(self) -> Mapping[Control, Collection[str]]:
        return {}

    def flips(self, *, in_float64: bool = False) -> bool:
        del in_float64
        return False

    def twin(self, *, urgent: bool = True) -> Values:
        del urgent
        raise ControlError("one operator is not compiled by itself here")

    def with_fixed_choices(self) -> None:
        return None

    def recompiled(self) -> None:
        return None

    def unfused(self) -> None:
        return None


def call_oracle(call: OperatorCall, expected: Any, actual: Any) -> Finding | None:
    """Check the compiled program's result of one operator call.

    Args:
        call: The call, on the compiled program's own inputs.
        expected: Eager's result from these inputs.
        actual: The compiled program's result: a tensor, or a tuple with None for unknown items.

    Returns:
        The first failing finding, beyond rounding; None if there is none.
    """
    wanted, found = values_of(expected), values_of(actual)
    names = [name for name in wanted if name in found]
    structure = [
        finding
        for finding in compare_parts([Part(name, wanted[name], found[name]) for name in names])
        if finding.detail not in LAYOUT
    ]
    if structure:
        return structure[0]
    decisions = decide(
        [TensorPair(name, name, wanted[name], found[name]) for name in names], lambda: _CallControls(call), {}
    )
    return next(
        (finding for finding in decisions.findings if finding.kind.fails and finding.kind is not Kind.RNG), None
    )


def values_of(result: Any) -> Values:
    """The tensors of an operator's result, by their place in it."""
    results: Sequence[Any] = result if isinstance(result, (tuple, list)) else (result,)
    return {f"output[{place}]": one for place, one in enumerate(results) if isinstance(one, torch.Tensor)}


def _rounds(value: torch.Tensor) -> bool:
    return type(value) is torch.Tensor and value.dtype.is_floating_point and value.layout is torch.strided
