"""Test whether two samples come from one distribution, whatever it is: the exact rank-sum test."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import comb

__all__ = ["rank_sum_probability"]


def rank_sum_probability(one: Sequence[float], other: Sequence[float]) -> float:
    """The probability of ranks as different as these, or more different, if both samples have the same distribution.

    This is the two-sided test of Mann and Whitney with its exact distribution. It only assumes that the elements of the
    samples are independent. Equal elements count half each.

    Args:
        one: A sample.
        other: Another sample.
    """
    wins = sum((a > b) + (a == b) / 2 for a in one for b in other)
    total = len(one) * len(other)
    as_different = int(min(wins, total - wins) + 0.5)  # rounded towards no difference
    counts = _counts(len(one), len(other))
    return min(1.0, 2 * sum(counts[: as_different + 1]) / comb(len(one) + len(other), len(one)))


def _counts(first: int, second: int) -> list[int]:
    """For each number of wins, how many orders of two samples have it: coefficients of a Gaussian binomial."""
    most = first * second
    counts = [1] + [0] * most
    for step in range(1, first + 1):
        for place in range(most, second + step - 1, -1):  # times (1 - q ** (second + step))
            counts[place] -= counts[place - second - step]
        for start in range(min(step, most + 1)):  # divided by (1 - q ** step)
            counts[start::step] = accumulate(counts[start::step])
    return counts
