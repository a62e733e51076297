"""Check the gradient of each tensor on a walk through a region's graph: the sum of what its readers pass back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from checked_backend.numerics.bits import unit_roundoff
from checked_backend.regions.operator_check.lane import CANCELS, Lane, Moved
from checked_backend.regions.operator_check.tensor_checks import (
    TOO_FEW,
    TensorChecks,
    alike,
    can_be_checked,
    own_error,
    roundoff_of,
)


@dataclass(slots=True)
class _Sum:
    """Gradients on their way to one tensor."""

    by_lane: list[torch.Tensor | None]
    roundoff: float
    narrows: bool = False
    jumps: bool = False
    smooth: bool = True
    whole: bool = True
    largest: torch.Tensor | None = None


class GradientSums:
    """The gradients that arrive at tensors of a region, in each lane."""

    def __init__(self, lanes: Sequence[Lane], moved: Sequence[Moved], checks: TensorChecks) -> None:
        self._lanes = lanes
        self._moved = moved
        self._checks = checks
        self._sums: dict[fx.Node, _Sum] = {}

    def expect(self, node: fx.Node, value: torch.Tensor) -> None:
        """Gather the gradient of a node's value from now on."""
        self._sums[node] = _Sum([None] * len(self._lanes), roundoff_of(value))

    def incomplete(self, node: fx.Node, sources: Sequence[fx.Node], reason: str = "") -> None:
        """Note that a node's gradients for its sources are unknown, so that the sources' sums cannot be checked."""
        for source in sources:
            if source in self._sums:
                self._sums[source].whole = False
                if reason and not any(node.name in told for told in self._checks.unchecked):
                    self._checks.unchecked[f"gradients that pass {node.name}"] = reason

    def pass_back(
        self,
        node: fx.Node,
        sources: Sequence[fx.Node],
        arriving: torch.Tensor | None,
        *,
        roundoff: float,
        jumps: bool,
        smooth: bool,
        exact: bool = False,
    ) -> None:
        """Run a node's backward pass in each lane, and add the resulting gradients to the sums of its sources.

        Args:
            sources: The nodes that it is made of.
            arriving: The compiled program's gradient of the node's value; None if nothing depends on it.
            roundoff: How far the node's value may be off.
            jumps: Whether rounding may change the gradients that it passes back by any amount.
            smooth: Whether rounding is known not to.
            exact: Whether the gradient is known exactly, and is not moved.
        """
        if arriving is None or not any(source in self._sums for source in sources):
            return  # no requested gradient depends on it
        for place, lane in enumerate(self._lanes):
            given = arriving
            if 2 <= place < 2 + len(self._moved) and not exact:
                moved = self._moved[place - 2].shift(arriving, unit_roundoff(arriving.dtype))
                given = arriving.to(torch.float64) + moved
            largest: dict[fx.Node, torch.Tensor] = {}
            try:
                found = lane.gradients(node, sources, given, largest)
            except Exception as error:
                self._checks.unchecked[f"gradient at {node.name}"] = f"{type(error).__name__}: {error}".splitlines()[0]
                self.incomplete(node, sources)
                return
            self._add(place, found)
            self._add_parts(largest)
        for source in sources:
            if source in self._sums:
                one = self._sums[source]
                one.narrows |= roundoff > one.roundoff
                one.roundoff = max(roundoff, one.roundoff)
                one.jumps |= jumps
                one.smooth &= smooth

    def _add(self, place: int, found: Mapping[fx.Node, torch.Tensor | None]) -> None:
        for source, gradient in found.items():
            one = self._sums.get(source)
            if gradient is None or one is None:
                continue
            known = one.by_lane[place]
            one.by_lane[place] = gradient if known is None else known + gradient

    def _add_parts(self, largest: Mapping[fx.Node, torch.Tensor]) -> None:
        for source, part in largest.items():
            one = self._sums.get(source)
            if one is not None:
                one.largest = part if one.largest is None else torch.maximum(one.largest, part)

    def _round_sum(self, made: list[torch.Tensor], largest: torch.Tensor, roundoff: float) -> None:
        """Move the perturbed lanes' sums by a rounding of their greatest part, where it is far greater than the sum."""
        cancelled = torch.where(largest > CANCELS * made[1].detach().abs(), largest, 0.0)
        if bool(cancelled.any()):
            for place, moved in enumerate(self._moved, 2):
                made[place] = made[place] + torch.where(cancelled > 0, moved.shift(cancelled, roundoff), 0.0)

    def finish(self, node: fx.Node, sent: torch.Tensor | None) -> None:
        """Check the gradient of a node's value once its sum is complete, and forget the sum."""
        total = self._sums.pop(node, None)
        if total is not None and total.whole:
            self._check_gradient(node, total, sent)

    def _check_gradient(self, node: fx.Node, total: _Sum, sent: torch.Tensor | None) -> None:
        known = [one for one in (sent, *total.by_lane) if one is not None]
        if not known:
            return
        found = torch.zeros_like(known[0]) if sent is None else sent
        made = [torch.zeros_like(known[0]) if one is None else one for one in total.by_lane]
        if not can_be_checked(found) or found.layout is not torch.strided or not found.numel():
            return
        if any(not alike(one, found) for one in made):
            self._checks.unchecked[f"gradient of {node.name}"] = "eager computes another shape from the same inputs"
            return
        if self._checks.settle(node, found, made[0], gradient=True):
            return
        if total.largest is not None and alike(total.largest, found):
            self._round_sum(made, total.largest, unit_roundoff(found.dtype))
        error = own_error(
            found,
            made,
            roundoff=total.roundoff,
            narrows=total.narrows,
            jumps=total.jumps,
            smooth=total.smooth,
        )
        if error is None:
            if not torch.equal(found.nan_to_num(), made[0].nan_to_num()):
                self._checks.unchecked[f"gradient of {node.name}"] = TOO_FEW
        else:
            self._checks.note(node, error, found, made[1], gradient=True)
