"""Programs whose results eager itself does not repeat."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.cases import case, normal, seeded


@case("nondeterministic")
def padding_left_uninitialised() -> tuple[Any, ...]:
    """Only the first columns of a buffer are written; all are returned."""

    def fn(x: Tensor) -> Tensor:
        buffer = torch.empty(64, 200)
        buffer[:, :100] = x
        return buffer

    return fn, normal(64, 100)


@case("nondeterministic")
def sum_over_uninitialised() -> tuple[Any, ...]:
    """The sum of memory that nobody wrote."""
    return (lambda x: torch.empty_like(x).sum() + x.sum()), normal(1000)


@case("nondeterministic")
def resized_buffer() -> tuple[Any, ...]:
    """new_empty, half filled."""

    def fn(x: Tensor) -> Tensor:
        return torch.cat([x * 2, x.new_empty(5000)])

    return fn, normal(10)


@case("nondeterministic", train=True)
def unseeded_dropout_net() -> tuple[Any, ...]:
    """A network with dropout; nobody seeds the generator."""

    def net() -> nn.Module:
        return nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.5), nn.ReLU(), nn.Linear(64, 4))

    return seeded(net), normal(8, 16)


@case("nondeterministic")
def multinomial_sampling() -> tuple[Any, ...]:
    """Tokens drawn from a softmax."""
    return (lambda x: torch.multinomial(F.softmax(x, -1), 3)), normal(8, 50)


@case("nondeterministic")
def random_permutation() -> tuple[Any, ...]:
    """Rows in random order."""
    return (lambda x: x[torch.randperm(x.shape[0])] * 2), normal(64, 4)


@case("nondeterministic")
def alpha_and_feature_dropout() -> tuple[Any, ...]:
    """Two other kinds of dropout."""
    return (lambda x: F.alpha_dropout(x, 0.3, True) + F.dropout2d(x, 0.5, True)), normal(4, 8, 5, 5)


@case("nondeterministic")
def randomised_relu() -> tuple[Any, ...]:
    """A random slope in training."""
    return (lambda x: F.rrelu(x, training=True)), normal(1000)


@case("nondeterministic")
def bernoulli_and_normal() -> tuple[Any, ...]:
    """Draws of several kinds, from one generator."""

    def fn(x: Tensor) -> Tensor:
        return torch.bernoulli(torch.sigmoid(x)) * torch.normal(x, 1.0) + torch.rand_like(x) + torch.randint(5, x.shape)

    return fn, normal(500)


@case("nondeterministic")
def numpy_random() -> tuple[Any, ...]:
    """Random numbers that torch knows nothing of."""

    def fn(x: Tensor) -> Tensor:
        return x + torch.from_numpy(np.random.default_rng().random(x.shape[0]))

    return fn, normal(20).double()


@case("nondeterministic")
def counts_its_calls() -> tuple[Any, ...]:
    """A function with a state of its own."""
    calls: list[int] = []

    def fn(x: Tensor) -> Tensor:
        calls.append(1)
        return x * len(calls)

    return fn, normal(20)


@case("nondeterministic")
def random_in_python() -> tuple[Any, ...]:
    """A factor drawn outside of the graph."""

    def fn(x: Tensor) -> Tensor:
        return x * float(torch.rand(()).item())

    return fn, normal(20)
