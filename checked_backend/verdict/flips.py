"""Tolerate a few elements that flip in the candidate alone, if many others flip in control runs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from checked_backend.verdict import thresholds
from checked_backend.verdict.envelope import Envelope

__all__ = ["as_rare_as_jumps", "as_rare_as_unstable"]


def as_rare_as_jumps(
    outside: torch.Tensor, jumps: torch.Tensor, distance: torch.Tensor, strong: Envelope | None
) -> bool:
    """Whether the unexplained elements are a few that flip in the candidate and by chance in no control run.

    Args:
        outside: The unexplained elements.
        jumps: The elements that flip in control runs.
        distance: How far the candidate lies from the reference.
        strong: The noise from strong control runs.
    """
    if strong is None or not bool(jumps.any()):
        return False
    if int(outside.sum().item()) > thresholds.MISSED_JUMPS * int(jumps.sum().item()):
        return False
    return bool((distance[outside] <= thresholds.STRONG_FACTOR * strong.values[jumps].max()).all())


def as_rare_as_unstable(nonfinite: torch.Tensor, envelopes: Sequence[Envelope], values: torch.Tensor) -> torch.Tensor:
    """Tolerate elements that are NaN or infinite on one side, if control runs make elements of about their value so.

    Args:
        nonfinite: The unexplained elements that are NaN or infinite on one side.
        envelopes: The noise from control runs.
        values: The right values of the elements.

    Returns:
        A mask of the tolerated elements; empty if there are too many of them to be there by chance.
    """
    none = torch.zeros_like(nonfinite)
    unstable, reach, count = none, 0.0, 0
    for one in envelopes:
        if one.unstable is not None:
            unstable, count = unstable | one.unstable, count + int(one.unstable.sum().item())
            reach = max(reach, float(torch.where(one.unstable, one.values, 0.0).max().item()))
    if not bool(nonfinite.any()) or int(nonfinite.sum().item()) > thresholds.MISSED_JUMPS * count:
        return none
    return nonfinite & _near(values.to(torch.float64), unstable, thresholds.STRONG_FACTOR * reach)


def _near(values: torch.Tensor, others: torch.Tensor, reach: float) -> torch.Tensor:
    """A mask of values that are near some finite value at the places ``others``."""
    known = values[others & values.isfinite()].sort().values
    if not known.numel():
        return torch.zeros_like(others)
    place = torch.searchsorted(known, values.contiguous())
    above, below = known[place.clamp_max(len(known) - 1)], known[(place - 1).clamp_min(0)]
    apart = torch.minimum((values - above).abs(), (values - below).abs())
    near: torch.Tensor = apart <= thresholds.SAME_PLACE * values.abs() + reach
    return near
