"""The exact rank-sum test."""

from __future__ import annotations

from itertools import combinations
from math import comb

import pytest

from checked_backend.numerics.ranks import rank_sum_probability


def test_it_counts_all_orders() -> None:
    orders = list(combinations(range(7), 3))
    for chosen in orders:
        one, other = list(chosen), [rank for rank in range(7) if rank not in chosen]
        wins = sum(a > b for a in one for b in other)
        extreme = 0
        for order in orders:
            rest = [rank for rank in range(7) if rank not in order]
            extreme += sum(a > b for a in order for b in rest) <= min(wins, 12 - wins)
        assert rank_sum_probability(one, other) == pytest.approx(min(1.0, 2 * extreme / len(orders)))


def test_samples_that_are_apart_have_the_least_probability() -> None:
    one, other = list(range(20)), list(range(100, 120))
    assert rank_sum_probability(one, other) == pytest.approx(2 / comb(40, 20))


def test_equal_samples_are_no_evidence() -> None:
    assert rank_sum_probability([1.0] * 30, [1.0] * 30) == 1.0
