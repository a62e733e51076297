"""Whether two tensors have the same bits, in whatever way they lie in memory."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from checked_backend.numerics.bits import same_bits

LAYOUTS: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda x: x,
    lambda x: x.t(),
    lambda x: x[:, 1:2],
    lambda x: x[:0],
    lambda x: x.to(torch.complex64),
    lambda x: torch.complex(x, x).conj(),
    lambda x: torch.complex(x, x).conj().imag,  # it waits to be negated
    lambda x: x[:1, 0].bfloat16(),
    lambda x: torch.ones(3, 3).expand(2, 3, 3) * x.sum(),
]


@pytest.mark.parametrize("one", LAYOUTS)
@pytest.mark.parametrize("other", [lambda x: x.clone(), lambda x: torch.stack([x, x], -1)[..., 0]])
def test_copies_have_the_same_bits(
    one: Callable[[torch.Tensor], torch.Tensor], other: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    value = one(torch.randn(5, 3))
    copy = other(value)
    assert same_bits(value, copy)
    if copy.numel():
        copy = copy.contiguous()  # of an expanded tensor one element cannot be changed
        copy[(-1,) * copy.dim()] += 1
        assert not same_bits(value, copy)


def test_the_sign_of_a_zero_and_the_kind_of_a_nan_are_bits() -> None:
    zero, nan = torch.zeros(3), torch.full((3,), math.nan)
    assert same_bits(nan, nan.clone())
    assert not same_bits(zero, -zero)
    assert not same_bits(nan, (nan.view(torch.int32) + 1).view(torch.float32))
