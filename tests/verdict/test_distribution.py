"""Where in a tensor the differences are: a map of blocks, a histogram of ulps, the worst elements."""

from __future__ import annotations

import math

import pytest
import torch

from checked_backend.numerics.bits import FORMATS
from checked_backend.numerics.measure import measure
from checked_backend.verdict import closing
from checked_backend.verdict.distribution import BLOCK_COLUMNS, BLOCK_ROWS, MOST_WORST, distribution
from tests.support import faults
from tests.support.region_tools import checked, gathered


@pytest.mark.parametrize(
    "shape", [(), (1,), (7,), (5000,), (3, 4), (100, 200), (2, 3, 4, 5), (1, 1, 900), (900, 1), (2, 3000), (5, 99_991)]
)
def test_one_wrong_element_is_in_one_block_and_first_among_the_worst(shape: tuple[int, ...]) -> None:
    reference = torch.rand(shape) + 1
    candidate = reference.clone()
    place = reference.numel() * 2 // 3
    candidate.view(-1)[place] += 0.5
    found = distribution(reference, candidate, reference.double() * 2)
    rows, columns = found.matrix
    assert found.shape == shape
    assert rows * columns >= reference.numel() > (rows - 1) * columns
    assert len(found.blocks) <= BLOCK_ROWS
    assert all(len(row) == len(found.blocks[0]) <= BLOCK_COLUMNS for row in found.blocks)
    high, wide = -(-rows // BLOCK_ROWS), -(-columns // BLOCK_COLUMNS)
    hot = [(y, x) for y, row in enumerate(found.blocks) for x, value in enumerate(row) if value]
    assert hot == [(place // columns // high, place % columns // wide)]
    assert found.blocks[hot[0][0]][hot[0][1]] == pytest.approx(0.5)
    (worst,) = found.worst
    assert reference[worst.index].item() == worst.expected == reference.view(-1)[place].item()
    assert (worst.actual, worst.float64) == (candidate[worst.index].item(), 2 * worst.expected)
    assert sum(found.ulps) == reference.numel()
    assert found.ulps[0] == reference.numel() - 1


@pytest.mark.parametrize("dtype", [dtype for dtype in FORMATS if dtype.itemsize > 1], ids=str)
def test_ulps_are_counted_by_powers_of_two(dtype: torch.dtype) -> None:
    form = FORMATS[dtype]
    begin = torch.ones(9, dtype=dtype).view(form.bits)
    steps = torch.tensor([0, 1, 2, 3, 4, 7, 8, -1, -5], dtype=form.bits)
    reference, candidate = begin.view(dtype), (begin + steps).view(dtype)
    assert distribution(reference, candidate).ulps == (1, 2, 2, 3, 1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn])
def test_the_greatest_count_is_that_of_the_metrics(dtype: torch.dtype) -> None:
    reference = torch.randn(200, dtype=torch.float32).to(dtype)
    candidate = torch.randn(200, dtype=torch.float32).to(dtype)  # other signs too
    greatest = measure(reference=reference, candidate=candidate).max_ulp
    assert greatest
    assert len(distribution(reference, candidate).ulps) - 1 == pytest.approx(math.floor(math.log2(greatest)) + 1, abs=1)


def test_nan_on_one_side_is_infinite_and_comes_first_and_no_ulp() -> None:
    reference = torch.tensor([1.0, math.nan, 2.0, math.inf, 3.0])
    found = distribution(reference, torch.tensor([9.0, math.nan, math.nan, math.inf, 3.0]))
    assert [element.index for element in found.worst] == [(2,), (0,)]
    assert max(map(max, found.blocks)) == math.inf
    assert sum(found.ulps) == 2


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
def test_what_has_no_ulps_has_the_rest(dtype: torch.dtype) -> None:
    reference = torch.tensor([0, 1, 1, 0]).to(dtype)
    found = distribution(reference, reference.logical_not().to(dtype))
    assert found.ulps == ()
    assert len(found.worst) == 4


def test_equal_and_empty_tensors_have_none() -> None:
    assert distribution(torch.ones(4), torch.ones(4)) is None
    assert distribution(torch.ones(0, 3), torch.ones(0, 3)) is None


def test_what_cannot_be_read_costs_no_finding() -> None:
    assert distribution(torch.ones(2, 2).to_sparse(), torch.zeros(2, 2).to_sparse()) is None
    assert distribution(torch.ones(2, device="meta"), torch.ones(2, device="meta")) is None


def test_it_is_small_whatever_the_tensor_is() -> None:
    reference = torch.zeros(40, 30, 1000)
    found = distribution(reference, torch.rand(40, 30, 1000))
    assert len(found.blocks) * len(found.blocks[0]) <= BLOCK_ROWS * BLOCK_COLUMNS
    assert len(found.worst) == MOST_WORST
    assert not reference.requires_grad


@pytest.mark.parametrize("wrong", [False, True])
def test_a_clean_run_makes_none(wrong: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []
    monkeypatch.setattr(closing, "distribution", lambda *tensors: made.append(tensors))
    compiler = faults.wrong_value(0) if wrong else faults.clean()
    report = gathered(lambda: checked(lambda x: torch.sin(x) * 2, compiler)(torch.ones(4)))
    assert bool(made) is wrong is bool(report.findings)


def test_the_state_of_the_process_is_as_it_was() -> None:
    state, grad = torch.get_rng_state(), torch.is_grad_enabled()
    reference = torch.ones(4, requires_grad=True)
    distribution(reference, torch.zeros(4))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.is_grad_enabled() is grad
    assert reference.grad is None
