"""Tolerate a few elements that flip in the candidate alone, if many others flip in control runs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from checked_backend.verdict import thresholds
from checked_backend.verdict.elements import widened
from checked_backend.verdict.envelope import Envelope


def as_rare_as_jumps(distances: torch.Tensor, jumps: int, greatest: float) -> bool:
    """Whether the unexplained elements are a few that flip in the candidate and by chance in no control run.

    In strong control runs ``jumps`` elements flip, the furthest by ``greatest``.
    """
    if not jumps or distances.numel() > thresholds.MISSED_JUMPS * jumps:
        return False
    return bool((distances <= thresholds.STRONG_FACTOR * greatest).all())


def as_rare_as_unstable(
    values: torch.Tensor, envelopes: Sequence[Envelope], reference: torch.Tensor, candidate: torch.Tensor
) -> torch.Tensor:
    """Tolerate elements that are NaN or infinite on one side, if control runs make elements of about their value so.

    Args:
        values: The right values of the elements that are so without explanation.
        reference: The right values of all elements.
        candidate: What the compiled program has; it counts where the right value is not finite.

    Returns:
        A mask of the tolerated elements; empty if there are too many of them to be there by chance.
    """
    none = torch.zeros(values.shape, dtype=torch.bool, device=values.device)
    unstable, reach, count = none.any(), 0.0, 0
    for one in envelopes:
        if one.unstable is not None:
            unstable, count = unstable | one.unstable, count + int(one.unstable.sum().item())
            reach = max(reach, float(torch.where(one.unstable, one.values, 0.0).max().item()))
    if not values.numel() or values.numel() > thresholds.MISSED_JUMPS * count:
        return none
    others = known(widened(reference)[unstable], widened(candidate)[unstable]).to(torch.float64)
    return _near(values.to(torch.float64), others, thresholds.STRONG_FACTOR * reach)


def known(right: torch.Tensor, candidate: torch.Tensor) -> torch.Tensor:
    """The right values, and the candidate's where those are not finite."""
    return torch.where(right.isfinite(), right, candidate)


def _near(values: torch.Tensor, others: torch.Tensor, reach: float) -> torch.Tensor:
    """A mask of values that are near some finite one of others."""
    others = others[others.isfinite()].sort().values
    if not others.numel():
        return torch.zeros(values.shape, dtype=torch.bool, device=values.device)
    place = torch.searchsorted(others, values.contiguous())
    above, below = others[place.clamp_max(len(others) - 1)], others[(place - 1).clamp_min(0)]
    apart = torch.minimum((values - above).abs(), (values - below).abs())
    near: torch.Tensor = apart <= thresholds.SAME_PLACE * values.abs() + reach
    return near
