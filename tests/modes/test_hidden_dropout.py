"""Attention that drops weights inside its kernel draws the same again, in another precision by its mask."""

from __future__ import annotations

import pytest
import torch

import checked_backend as cb
from checked_backend.modes.monte_carlo import MonteCarloMode
from checked_backend.modes.random_tape import RandomTape, RecordRandom, ReplayRandom
from tests.support import faults
from tests.support.hidden_attention import hidden_attention, with_hidden_attention

pytestmark = pytest.mark.usefixtures("_operators")

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@pytest.fixture(scope="module")
def _operators():
    with with_hidden_attention():
        yield


def made(dtype: torch.dtype = torch.float32) -> Inputs:
    generator = torch.Generator().manual_seed(1)
    query, key, value = (torch.randn(2, 3, length, 8, generator=generator) for length in (7, 20, 20))
    return tuple(one.to(dtype).requires_grad_() for one in (query, key, value))


def trained(inputs: Inputs) -> list[torch.Tensor]:
    """The result of attention and its gradients."""
    result = hidden_attention(*inputs, 0.3)
    return [result.detach(), *torch.autograd.grad(result.sin().sum(), inputs)]


def recorded(inputs: Inputs) -> tuple[RandomTape, list[torch.Tensor]]:
    tape = RandomTape()
    with RecordRandom(tape):
        return tape, trained(inputs)


def test_the_same_weights_are_dropped_again() -> None:
    tape, first = recorded(made())
    assert [name.split(".")[1] for name in tape.ops] == ["_scaled_dot_product_hidden_attention"]  # backward draws none
    before = torch.get_rng_state()
    again = made()
    for _ in range(2):
        with ReplayRandom(tape):
            assert all(map(torch.equal, trained(again), first))
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(trained(made())[0], first[0])


def test_noise_is_that_of_rounding_alone() -> None:
    tape, first = recorded(made())
    again = made()
    with ReplayRandom(tape), MonteCarloMode(0):
        perturbed = trained(again)
    for one, other in zip(first, perturbed, strict=True):
        assert 0 < (one - other).norm() < 1e-5 * one.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_float64_the_mask_is_the_kernels(dtype: torch.dtype) -> None:
    tape, first = recorded(made(dtype))
    wide = tuple(one.detach().double().requires_grad_() for one in made(dtype))
    with ReplayRandom(tape):
        exact = trained(wide)
    for one, other in zip(first, exact, strict=True):
        assert (one - other).norm() < 8 * torch.finfo(dtype).eps * other.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_region_with_it_is_decided(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    right = cb.check(lambda *inputs: hidden_attention(*inputs, 0.3).sin(), made(dtype), compiler="aot_eager")
    assert right.verdict is cb.Verdict.PASS, str(right)
    assert right.coverage.checked["gradients"] == 3
    compiler = faults.wrong_operator("aten.sin.default", how="aot")
    wrong = cb.check(lambda *inputs: hidden_attention(*inputs, 0.3).sin(), made(dtype), compiler=compiler)
    assert ("logic", "output[0]") in {(finding.detail, finding.subject) for finding in wrong.findings}, str(wrong)
