from __future__ import annotations

import math

import pytest
import torch

from checked_backend.numerics.workspace import SumOfSquares, Workspace


def test_ratio_ignores_nan_of_either_sign():
    workspace = Workspace(8, torch.device("cpu"))
    for zero_by_zero in (math.nan, -math.nan):
        workspace.gap.copy_(torch.tensor([zero_by_zero, 1.0, 0.0, 6.0, 0.0, 0.0, zero_by_zero, 2.0]))
        workspace.size.fill_(2.0)
        assert workspace.max_ratio() == 3.0
    workspace.gap.zero_()
    workspace.size.zero_()
    assert workspace.max_ratio() == 0.0
    workspace.gap.fill_(1.0)
    workspace.size.zero_()
    assert workspace.max_ratio() == math.inf


def test_statistics_see_infinity():
    workspace = Workspace(3, torch.device("cpu"))
    workspace.gap.copy_(torch.tensor([1.0, math.inf, 0.0]))
    workspace.size.copy_(torch.tensor([math.inf, 1.0, 0.0]))
    assert workspace.gap_statistics().peak == workspace.size_statistics().peak == math.inf


@pytest.mark.parametrize("size", [1e-300, 1.0, 1e300])
def test_squares_stay_in_range(size):
    workspace = Workspace(2, torch.device("cpu"))
    workspace.gap.copy_(torch.tensor([3.0 * size, 4.0 * size], dtype=torch.float64))
    assert workspace.gap_statistics().squares.root_mean(25) == pytest.approx(size)


def test_sum_of_squares_of_unlike_scales():
    total = SumOfSquares()
    assert total.root_mean(0) == 0.0
    total.add(SumOfSquares(1.0, -4000))
    assert total.root_mean(1) == 0.0
    total.add(SumOfSquares(0.0, 5000))
    total.add(SumOfSquares(9.0, 0))
    total.add(SumOfSquares(7.0, 0))
    assert total.root_mean(4) == 2.0
    total.add(SumOfSquares(1.0, 1200))
    assert total.root_mean(1) == 2.0**600
