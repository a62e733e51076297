"""The numbers that enter a backward pass, and their places in memory."""

from __future__ import annotations

import pytest
import torch

from checked_backend.checking.cotangents import Incoming, exact, full_mantissa, laid_out, layouts_of, overflowed

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


@pytest.mark.parametrize("incoming", [Incoming.SMALL, Incoming.LARGE])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_small_and_large_ones_use_every_bit_over_powers_of_ten(dtype: torch.dtype, incoming: Incoming) -> None:
    numbers = full_mantissa((5000,), dtype, generator(), incoming)
    assert torch.equal(numbers.to(dtype).double(), numbers)
    assert numbers.min() < 0 < numbers.max()
    sizes = numbers.abs()
    assert sizes.min() >= torch.finfo(dtype).tiny
    assert sizes.max() / sizes.min() > (20 if dtype is torch.float16 else 1e4)
    assert (sizes.max() < 2.5e-3) if incoming is Incoming.SMALL else (sizes.min() > 0.9)
    assert sizes.max() < torch.finfo(dtype).max / 500


def test_exact_numbers_are_exact_in_half_precision_and_one_alone_is_one() -> None:
    numbers = exact((1000,), generator())
    for dtype in NARROWER[2:]:
        assert torch.equal(numbers.to(dtype).double(), numbers)
    assert (numbers == 0).any()
    assert float(exact((), generator())) == 1


@pytest.mark.parametrize("layout", [each for each in Incoming if each is not Incoming.CONJUGATED])
def test_layouts_have_the_shape_and_mostly_the_values(layout: Incoming) -> None:
    values = exact((2, 3, 4, 5), generator())
    made = laid_out(values, layout)
    assert made.shape == values.shape
    if layout not in (Incoming.EXPANDED, Incoming.ROWS, Incoming.COLUMNS):
        assert torch.equal(made, values)
    assert (made.stride() == values.stride()) == (not layout.is_laid_out)
    assert bool(made.storage_offset()) == (layout is Incoming.SPARED)


def test_expanded_ones_have_no_stride_and_are_not_zero() -> None:
    whole = laid_out(exact((4, 6), generator()), Incoming.EXPANDED)
    assert whole.stride() == (0, 0)
    rows = laid_out(exact((4, 6), generator()), Incoming.ROWS)
    assert rows.stride() == (0, 1)
    columns = laid_out(exact((4, 6), generator()), Incoming.COLUMNS)
    assert columns.stride() == (1, 0)
    assert whole.count_nonzero() == rows.count_nonzero() == columns.count_nonzero() == 24


@pytest.mark.parametrize("incoming", [Incoming.INFINITE, Incoming.NAN])
def test_some_overflow_and_the_others_are_numbers(incoming: Incoming) -> None:
    made = overflowed(torch.ones(8, 8), generator(), incoming)
    wrong = made.isinf() if incoming is Incoming.INFINITE else made.isnan()
    assert wrong[0, 0]
    assert 1 < int(wrong.sum()) < 32
    assert bool((made[~wrong] == 1).all())
    assert not overflowed(torch.ones(()), generator(), incoming).isfinite()
    assert overflowed(torch.ones(0, 3), generator(), incoming).shape == (0, 3)


def test_conjugated_ones_have_the_values_and_a_bit_that_says_so() -> None:
    values = torch.complex(exact((3, 2), generator()), exact((3, 2), generator()))
    made = laid_out(values, Incoming.CONJUGATED)
    assert made.is_conj()
    assert torch.equal(made.resolve_conj(), values)


def test_each_of_several_outputs_gets_gradients_alone_or_with_others() -> None:
    outputs = {"a": 1, "b": 2, "c": 3}
    assert Incoming.FIRST.at(outputs) == {"a": 1}
    assert Incoming.OTHERS.at(outputs) == {"b": 2, "c": 3}
    assert Incoming.CONTIGUOUS.at(outputs) == Incoming.EXPANDED.at(outputs) == outputs


def test_only_layouts_that_some_output_can_have() -> None:
    assert layouts_of([]) == []
    sizes = [Incoming.SMALL, Incoming.LARGE]
    overflows = [Incoming.INFINITE, Incoming.NAN]
    assert layouts_of([torch.ones(())]) == [*sizes, Incoming.SPARED, *overflows]
    assert layouts_of([torch.ones(3)]) == [*sizes, Incoming.SPARED, Incoming.EXPANDED, *overflows]
    tables = [Incoming.ROWS, Incoming.COLUMNS, Incoming.TRANSPOSED]
    assert layouts_of([torch.ones(3, 2)]) == [*sizes, Incoming.SPARED, Incoming.EXPANDED, *overflows, *tables]
    several = layouts_of([torch.ones(3, dtype=torch.complex64), torch.ones(2, 3, 4, 4)])
    assert set(several) == {each for each in Incoming if each is not Incoming.CONTIGUOUS}
