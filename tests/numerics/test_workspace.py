from __future__ import annotations

import math

import pytest
import torch

from checked_backend.numerics.workspace import SumOfSquares, Workspace


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ratio_ignores_nan_of_either_sign(dtype):
    workspace = Workspace(8, dtype, torch.device("cpu"))
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


def test_statistics_see_nan_and_infinity():
    workspace = Workspace(3, torch.float32, torch.device("cpu"))
    for bad in (math.nan, math.inf):
        workspace.gap.copy_(torch.tensor([1.0, bad, 0.0])).abs_()
        workspace.size.copy_(torch.tensor([bad, 1.0, 0.0])).abs_()
        assert not math.isfinite(workspace.gap_statistics().peak)
        assert not math.isfinite(workspace.size_statistics().peak)


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
