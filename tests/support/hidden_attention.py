"""Attention on the processor whose kernel drops weights inside, as those of a GPU do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

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


@contextmanager
def with_hidden_attention() -> Iterator[None]:
    """In the block `hidden_attention` can be called and compiled."""
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
    try:
        yield
    finally:
        library._destroy()


def hidden_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout_p: float) -> torch.Tensor:
    """Attention with dropout inside of its kernel; (batch, heads, length, width) each."""
    return torch.ops.checked_backend_hidden.attention(query, key, value, dropout_p)
