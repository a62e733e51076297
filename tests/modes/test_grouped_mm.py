from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from checked_backend.modes.grouped_mm import grouped_mm

SHAPES = {
    "rows": ((8, 16), (3, 16, 4)),
    "columns": ((3, 4, 16), (16, 8)),
    "inner": ((4, 8), (8, 16)),
    "batches": ((3, 4, 16), (3, 16, 8)),
}


@pytest.mark.parametrize("name", SHAPES)
def test_equals_torch_with_its_gradients(name: str) -> None:
    operands = [torch.randn(shape, requires_grad=True) for shape in SHAPES[name]]
    offs = None if name == "batches" else torch.tensor([3, 3, 8], dtype=torch.int32)  # an empty group, too
    expected, actual = F.grouped_mm(*operands, offs=offs), grouped_mm(*operands, offs=offs)
    torch.testing.assert_close(actual, expected)
    upstream = torch.randn_like(expected)
    gradients, right = (torch.autograd.grad(result, operands, upstream) for result in (actual, expected))
    torch.testing.assert_close(gradients, right)


def test_what_is_infinite_in_one_group_stays_there() -> None:
    rows, weights = torch.ones(4, 2, dtype=torch.float64), torch.ones(2, 2, 3, dtype=torch.float64)
    weights[1, 0, 0] = float("inf")
    result = grouped_mm(rows, weights, offs=torch.tensor([2, 3], dtype=torch.int32))
    assert result[:2].eq(2).all()
    assert result[2].isinf().tolist() == [True, False, False]
    assert result[3].eq(0).all()  # belongs to no group


def test_a_bias_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="bias"):
        grouped_mm(torch.ones(2, 2), torch.ones(1, 2, 2), offs=torch.tensor([2]), bias=torch.ones(1, 2))
