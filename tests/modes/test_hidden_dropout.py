"""Attention that drops weights inside its kernel draws the same again, in another precision by its mask."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import checked_backend as cb
from checked_backend.modes.monte_carlo import MonteCarloMode
from checked_backend.modes.random_tape import RandomTape, RecordRandom, ReplayRandom
from tests.support import faults

_NAME = "_scaled_dot_product_hidden_attention"
_SEEDED = (torch.Tag.nondeterministic_seeded, torch.Tag.pt2_compliant_tag)


def _weights(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    return (query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5).softmax(-1)


def _kept(weights: torch.Tensor, dropout_p: float, seed: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(int(seed))
    return (torch.rand(weights.shape, generator=generator) >= dropout_p) / (1 - dropout_p)


def _forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout_p: float = 0.0, is_causal: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    if query.dtype is torch.float64:
        raise RuntimeError("not implemented for 'Double'")
    del is_causal
    seed = torch.randint(2**31, ())
    weights = _weights(query, key)
    return (weights * _kept(weights, dropout_p, seed)).to(value.dtype) @ value, seed


def _backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    seed: torch.Tensor,
    dropout_p: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    weights = _weights(query, key)
    kept = _kept(weights, dropout_p, seed).to(value.dtype)
    of_weights = weights * (part := (grad @ value.transpose(-1, -2)) * kept)
    scores = (of_weights - weights * (weights * part).sum(-1, keepdim=True)) / query.shape[-1] ** 0.5
    return scores @ key, scores.transpose(-1, -2) @ query, (weights * kept).transpose(-1, -2) @ grad


def _meaning(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout_p: float = 0.0) -> torch.Tensor:
    """As ``scaled_dot_product_attention``: a kernel where there is one for the dtype, else its parts."""
    if query.dtype is torch.float64:
        return torch.native_dropout(_weights(query, key), dropout_p, True)[0] @ value
    return getattr(torch.ops.checked_backend_hidden, _NAME)(query, key, value, dropout_p)[0]


@pytest.fixture(scope="module")
def _operators() -> Iterator[None]:
    """`hidden_attention` can be called and compiled."""
    library = torch.library.Library("checked_backend_hidden", "DEF")
    library.define(
        f"{_NAME}(Tensor query, Tensor key, Tensor value, float dropout_p=0.0, bool is_causal=False)"
        " -> (Tensor, Tensor)",
        tags=_SEEDED,
    )
    library.define(
        f"{_NAME}_backward(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor seed, float dropout_p)"
        " -> (Tensor, Tensor, Tensor)",
        tags=_SEEDED,
    )
    library.define("attention(Tensor query, Tensor key, Tensor value, float dropout_p=0.0) -> Tensor", tags=_SEEDED[1:])
    library.impl(_NAME, _forward, "CPU")
    library.impl(f"{_NAME}_backward", _backward, "CPU")
    library.impl("attention", _meaning, "CompositeImplicitAutograd")
    own = f"checked_backend_hidden::{_NAME}"

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs[:3], output[1])
        ctx.dropout_p = inputs[3]

    def backward(ctx: Any, grad: torch.Tensor, _seed: Any) -> Any:
        operator = getattr(torch.ops.checked_backend_hidden, f"{_NAME}_backward")
        return (*operator(grad, *ctx.saved_tensors, ctx.dropout_p), None, None)

    def like(query: torch.Tensor, *_others: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.empty_like(query), query.new_empty((), dtype=torch.int64)

    def gradients_like(_grad: Any, *inputs: Any) -> tuple[torch.Tensor, ...]:
        return tuple(torch.empty_like(one) for one in inputs[:3])

    torch.library.register_fake(own, like, lib=library)
    torch.library.register_fake(f"{own}_backward", gradients_like, lib=library)
    torch.library.register_autograd(own, backward, setup_context=setup, lib=library)
    yield
    library._destroy()


def hidden_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout_p: float) -> torch.Tensor:
    """Attention with dropout inside of its kernel; (batch, heads, length, width) each."""
    return torch.ops.checked_backend_hidden.attention(query, key, value, dropout_p)


pytestmark = pytest.mark.usefixtures("_operators")

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


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
    right = cb.check(lambda *inputs: hidden_attention(*inputs, 0.3).sin(), made(dtype), compiler="aot_eager")
    assert right.verdict is cb.Verdict.PASS, str(right)
    assert right.coverage.checked["gradients"] == 3
    compiler = faults.wrong_operator("aten.sin.default", how="aot")
    wrong = cb.check(lambda *inputs: hidden_attention(*inputs, 0.3).sin(), made(dtype), compiler=compiler)
    assert ("logic", "output[0]") in {(finding.detail, finding.subject) for finding in wrong.findings}, str(wrong)
