"""One exchange with other ranks, and which exchange of another run is the same."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

NEAR = 0.05
"""Two sent tensors count as equal, apart from noise, if their relative difference is at most this.

This only decides which of several collectives of one kind and shape belong together, never whether one is right.
"""

SAME = 1e-3
"""Of two sent tensors whose relative differences from a third one are at most this, neither is the likelier match.

A compiler may reorder collectives, so of two that are near, the one that sends the very same is the right one.
"""

_SAMPLE = 4096


Key = tuple[str, tuple[tuple[str, Any], ...], tuple[int, ...]]


@dataclass(eq=False, slots=True)
class Exchange:
    """One tensor that a rank sent in a collective, and the tensor that it received.

    Attributes:
        family: ``all_reduce``, ...
        terms: The parameters on which all ranks must agree.
        sent: A copy of the tensor that is sent; None if nothing of it reaches another rank, or memory was too short.
        received: A copy of the result; None before it has arrived, or if memory was too short.
        name: Its name in findings, once eager's order is known: ``all_reduce_0``.
    """

    family: str
    terms: tuple[tuple[str, Any], ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    sent: torch.Tensor | None
    received: torch.Tensor | None = None
    name: str = ""

    @property
    def key(self) -> Key:
        """The facts in which two exchanges must agree to be the same."""
        return self.family, self.terms, self.shape

    def __str__(self) -> str:
        terms = ", ".join(f"{name}={value}" for name, value in self.terms)
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.family}({dtype}{list(self.shape)}, {terms})"


def nearest(own: Exchange, others: Sequence[Exchange]) -> Exchange | None:
    """The exchange that sends the same. Of those that differ by rounding alone it is the first: their order decides."""
    near_ones = []
    for one in others:
        distance = _distance(own, one)
        if distance <= SAME:
            return one
        if distance <= NEAR:
            near_ones.append((distance, one))
    least = min((distance for distance, _ in near_ones), default=0.0)
    return next((one for distance, one in near_ones if distance <= 10 * least), None)


def indistinguishable(exchanges: Sequence[Exchange]) -> list[list[Exchange]]:
    """The exchanges that send the same and receive something else each, so that their order alone tells which is which.

    Returns:
        Groups of two exchanges and more.
    """
    groups: list[list[Exchange]] = []
    for one in exchanges:
        if one.received is None:
            continue
        like = [group for group in groups if group[0].key == one.key and _distance(group[0], one) <= SAME]
        if like:
            like[0].append(one)
        else:
            groups.append([one])
    return [group for group in groups if not all(_is_same(group[0].received, one.received) for one in group[1:])]


def _is_same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is not None and other is not None and one.dtype == other.dtype and torch.equal(one, other)


def alike(one: Exchange, other: Exchange) -> bool:
    """Whether two exchanges send the same, apart from noise."""
    return _distance(one, other) <= NEAR


def _distance(one: Exchange, other: Exchange) -> float:
    if one.sent is None or other.sent is None:
        return 0.0
    return near(one.sent, other.sent)


def near(one: torch.Tensor, other: torch.Tensor) -> float:
    """The relative distance of two tensors of one shape, in a sample of their elements."""
    step = max(1, one.numel() // _SAMPLE)
    first, second = (tensor.detach().reshape(-1)[::step].to(torch.float64) for tensor in (one, other))
    both = torch.isfinite(first) & torch.isfinite(second)
    same = first.nan_to_num(0.25, 0.5, -0.5)[~both] == second.nan_to_num(0.25, 0.5, -0.5)[~both]
    if not bool(same.all()):
        return math.inf
    scale = float(first[both].norm()) + float(second[both].norm())
    return 0.0 if not scale else 2 * float((first - second)[both].norm()) / scale
