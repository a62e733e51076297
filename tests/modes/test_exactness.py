"""What rounds nothing is not perturbed: counts, and integers that are held in floats."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from checked_backend.modes.monte_carlo import MonteCarloMode

EXPERTS = torch.tensor([0, 3, 3, 1, 2, 2, 2, 7, 5, 5, 5, 5, 5, 0])
FLOATS = (torch.float64, torch.float32)

EXACT = {
    "histc": lambda dtype: torch.histc(EXPERTS.to(dtype), 8, 0, 7),
    "truncated": lambda dtype: torch.histc(EXPERTS.to(dtype), 8, 0, 7).cumsum(0, dtype=torch.int32),
    "bincount": lambda dtype: torch.bincount(EXPERTS, torch.ones(14, dtype=dtype)),
    "one_hot": lambda dtype: F.one_hot(EXPERTS, 8).to(dtype).sum(0),
    "bools": lambda dtype: (EXPERTS > 2).sum(dtype=dtype),
    "count_nonzero": lambda dtype: EXPERTS.to(dtype).count_nonzero(),
    "cumsum": lambda dtype: torch.ones(1000, dtype=dtype).cumsum(0),
    "ranks": lambda dtype: torch.arange(100, dtype=dtype).flip(0) + 1,
    "rounded": lambda dtype: torch.linspace(0, 30, 50, dtype=dtype).round().sum(),
    "matmul": lambda dtype: F.one_hot(EXPERTS, 8).to(dtype).T @ torch.arange(14, dtype=dtype)[:, None],
    "index_add": lambda dtype: torch.zeros(8, dtype=dtype).index_add_(0, EXPERTS, torch.ones(14, dtype=dtype)),
    "counter": lambda dtype: torch.zeros((), dtype=dtype).add_(1).add_(1).add_(1),
    "counters": lambda dtype: torch._foreach_add([torch.zeros((), dtype=dtype)] * 2, 1.0)[0],
    "narrowed": lambda dtype: torch.arange(100, dtype=dtype).bfloat16(),
    "scalar": lambda dtype: torch.full((), 3.0, dtype=dtype) * torch.arange(4),
    "negative": lambda dtype: (torch.arange(20, dtype=dtype) - 10).sum(),
    "histogram": lambda dtype: torch.histogram(EXPERTS.to(dtype), 8)[0],
}
ROUNDED = {
    "halves of thirds": lambda dtype: (torch.arange(1, 50, dtype=dtype) / 3).sum(),
    "large": lambda dtype: torch.full((64,), 2.0**23 + 1, dtype=dtype).cumsum(0) if dtype == torch.float32 else None,
    "weights": lambda dtype: torch.bincount(EXPERTS, torch.full((14,), 0.1, dtype=dtype)),
    "density": lambda dtype: torch.histogram(EXPERTS.to(dtype), 8, density=True)[0],
    "mean": lambda dtype: torch.arange(100, dtype=dtype).mean() / 7,
    "narrowed thirds": lambda dtype: (torch.arange(100, dtype=dtype) / 3).bfloat16(),
}


def changed(program, dtype):
    def run(seed):
        with MonteCarloMode(seed):
            return program(dtype)

    before = program(dtype)
    return before is None or any(not torch.equal(run(seed), before) for seed in range(8))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", EXACT)
def test_counts_and_integers_are_not_perturbed(name, dtype):
    assert not changed(EXACT[name], dtype)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", ROUNDED)
def test_what_rounds_is_perturbed(name, dtype):
    assert changed(ROUNDED[name], dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_zeros_keep_their_sign(dtype):
    zeros = torch.tensor([0.0, -0.0] * 500, dtype=dtype)
    for program in (torch.expm1, torch.sin, F.elu, lambda x: x * 3.1, lambda x: x.view(20, 50)[:, ::2] / 3.1):
        for seed in range(3):
            with MonteCarloMode(seed):
                found = program(zeros)
            assert torch.equal(found.signbit(), program(zeros).signbit())


def test_an_operator_in_place_is_run_on_the_programs_memory_once():
    with MonteCarloMode(0):
        counted = torch.zeros(3)
        counted.index_add_(0, torch.tensor([0, 0, 2]), torch.ones(3))
        counted.scatter_add_(0, torch.tensor([1]), torch.ones(1))
    assert counted.tolist() == [2, 1, 1]


@pytest.fixture
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("shape", [(), (7,), (64, 33)])
@pytest.mark.parametrize("share", [0.05, 1.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_whole_numbers_among_others_are_not_perturbed(deterministic, dtype, share, shape):
    chosen = torch.rand(shape) < share
    values = torch.where(chosen, 3.0, torch.rand(shape) + 1 / 3).to(dtype)
    for source in (values, values.T.contiguous().T if len(shape) > 1 else values):
        with MonteCarloMode(0):
            found = source * 3.0
        assert bool((found[chosen] == 9.0).all())
        assert share == 1.0 or chosen.numel() < 10 or not torch.equal(found, source * 3.0)


def test_a_whole_number_is_kept_that_all_elements_share():
    with MonteCarloMode(0):
        found = torch.full((), 0.5) * torch.arange(20.0).expand(3, 20)
    assert torch.equal(found, 0.5 * torch.arange(20.0).expand(3, 20))


def test_a_product_with_a_long_number_is_kept_if_it_is_exact():
    values = torch.tensor([5.0, 6.0]).repeat(50)
    with MonteCarloMode(0):
        whole, other = (values * 0.7).view(50, 2).unbind(1)
    assert bool((whole == 3.5).all())
    assert other.unique().numel() > 1
