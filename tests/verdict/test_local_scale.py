from __future__ import annotations

import pytest
import torch

from checked_backend.verdict.elements import LocalScale, local_root_mean_square


def expected(values: torch.Tensor, magnitude: torch.Tensor, reach: int) -> torch.Tensor:
    """By the definition, for each element by itself."""
    results = []
    exponent = torch.frexp(magnitude.double()).exponent
    sized = magnitude.isfinite() & (magnitude > 0)
    counted = values.isfinite() & magnitude.isfinite()
    last = exponent[sized].max()
    for place, is_sized in enumerate(sized):
        among = counted
        if is_sized and exponent[place] + reach < last:
            among = counted & sized & (exponent <= exponent[place] + reach)
        results.append(values[among].double().square().mean().sqrt() if among.any() else torch.tensor(0.0))
    return torch.stack(results).double()


@pytest.mark.parametrize("reach", [0, 3, 10, 60])
def test_only_elements_that_are_not_much_larger_count(reach: int) -> None:
    values = torch.rand(400) ** 4
    magnitude = (10 * torch.randn(400)).exp()
    magnitude[:3] = torch.tensor([0.0, torch.inf, 1e30])
    greatest = float(values.max())
    scale = LocalScale(((values[part], magnitude[part]) for part in (slice(0, 7), slice(7, 400))), greatest)
    torch.testing.assert_close(scale.at(magnitude, reach), expected(values, magnitude, reach))
    assert torch.equal(scale.at(magnitude[50:60], reach), scale.at(magnitude, reach)[50:60])


def test_values_that_are_not_finite_do_not_count() -> None:
    values, magnitude = torch.tensor([1.0, torch.nan, torch.inf, 3.0]), torch.ones(4)
    assert local_root_mean_square(values, magnitude).tolist() == pytest.approx([5**0.5] * 4)
    assert local_root_mean_square(torch.zeros(3), torch.ones(3)).tolist() == [0, 0, 0]
    assert local_root_mean_square(torch.empty(0, 2), torch.empty(0, 2)).shape == (0, 2)


def test_neither_tiny_nor_huge_values_leave_the_range() -> None:
    for size in (1e-300, 1e300):
        values = torch.full((5,), size, dtype=torch.float64)
        assert local_root_mean_square(values, torch.ones(5)).tolist() == pytest.approx([size] * 5)
