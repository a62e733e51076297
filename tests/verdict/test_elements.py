from __future__ import annotations

import math

import pytest
import torch

from checked_backend.verdict import elements
from checked_backend.verdict.elements import blocks, difference, magnitudes, picked, root_mean_square


def test_blocks_walk_tensors_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elements, "_BLOCK", 4)
    first, second = torch.arange(6.0).view(2, 3).t(), torch.randn(3, 2, 2)
    parts = list(blocks(first, None, torch.view_as_complex(second), second))
    assert [part[0].tolist() for part in parts] == [[0, 3, 1, 4], [2, 5]]
    assert all(part[1] is None for part in parts)
    assert torch.equal(torch.cat([part[3] for part in parts]), second.view(6, 2))
    assert list(blocks(torch.empty(0, 3))) == []


def test_an_element_of_a_pair_picks_both() -> None:
    mask = torch.tensor([[False, True], [False, False], [True, True]])
    values = torch.tensor([1 + 2j, 3 + 4j, 5 + 6j])
    found = list(picked(mask, values, torch.view_as_real(values)))
    assert [tensor.tolist() for tensor in found if tensor is not None] == [[1 + 2j, 5 + 6j], [[1, 2], [5, 6]]]
    assert list(picked(mask, None)) == [None]


def test_numbers_whose_sum_overflows_are_finite() -> None:
    huge = torch.full((4,), 3e38)
    assert difference(huge, torch.zeros(4)).tolist() == huge.tolist()
    assert root_mean_square(torch.full((4,), 1e200, dtype=torch.float64)) == pytest.approx(1e200)


def test_nan_and_infinity_have_no_magnitude() -> None:
    assert magnitudes(torch.tensor([-2.0, math.nan, math.inf, -math.inf])).tolist() == [2, 0, 0, 0]
    assert root_mean_square(torch.tensor([3.0, math.nan, -math.inf, 4.0])) == pytest.approx(math.sqrt(12.5))
    assert root_mean_square(torch.tensor([math.nan])) == root_mean_square(torch.empty(0)) == 0
