"""The numbers that enter a backward pass, and their places in memory."""

from __future__ import annotations

import pytest
import torch

from checked_backend.checking.cotangents import Layout, exact, full_mantissa, laid_out, layouts_of

NARROWER = (torch.float8_e5m2, torch.float8_e4m3fn, torch.bfloat16, torch.float16, torch.float32)


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn])
def test_full_mantissas_are_exact_in_their_dtype_and_in_no_narrower_one(dtype: torch.dtype) -> None:
    numbers = full_mantissa((5000,), dtype, generator())
    assert torch.equal(numbers.to(dtype).double(), numbers)
    assert numbers.abs().min() >= 0.5
    assert numbers.abs().max() < 2
    assert numbers.min() < 0 < numbers.max()
    for narrow in NARROWER:
        if torch.finfo(narrow).eps > 2 * torch.finfo(dtype).eps:
            lost = (numbers.to(narrow).double() - numbers).abs() / numbers.abs()
            assert lost.min() > torch.finfo(narrow).eps / 8, narrow


def test_exact_numbers_are_exact_in_half_precision_and_one_alone_is_one() -> None:
    numbers = exact((1000,), generator())
    for dtype in NARROWER[2:]:
        assert torch.equal(numbers.to(dtype).double(), numbers)
    assert (numbers == 0).any()
    assert float(exact((), generator())) == 1


@pytest.mark.parametrize("layout", Layout)
def test_layouts_have_the_shape_and_mostly_the_values(layout: Layout) -> None:
    values = exact((2, 3, 4, 5), generator())
    made = laid_out(values, layout)
    assert made.shape == values.shape
    if layout not in (Layout.EXPANDED, Layout.ROWS):
        assert torch.equal(made, values)
    assert (made.stride() == values.stride()) == (layout is Layout.CONTIGUOUS)
    assert bool(made.storage_offset()) == (layout is Layout.SPARED)


def test_expanded_ones_have_no_stride_and_are_not_zero() -> None:
    whole = laid_out(exact((4, 6), generator()), Layout.EXPANDED)
    assert whole.stride() == (0, 0)
    rows = laid_out(exact((4, 6), generator()), Layout.ROWS)
    assert rows.stride() == (0, 1)
    assert whole.count_nonzero() == rows.count_nonzero() == 24


def test_only_layouts_that_some_output_can_have() -> None:
    assert layouts_of([]) == []
    assert layouts_of([torch.ones(())]) == [Layout.SPARED]
    assert layouts_of([torch.ones(3)]) == [Layout.SPARED, Layout.EXPANDED]
    assert layouts_of([torch.ones(3, 2)]) == [Layout.SPARED, Layout.EXPANDED, Layout.ROWS, Layout.TRANSPOSED]
    assert layouts_of([torch.ones(3), torch.ones(2, 3, 4, 4)]) == [each for each in Layout if each != Layout.CONTIGUOUS]
