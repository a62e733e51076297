"""Miscompiled elementwise arithmetic: numbers that come out wrong, NaN or infinite, and dtypes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.cases import case, normal, seeded

TINY = (1e-30, -1e-30, 3e-25, -2e-20, 1e-12, -1e-9, 5e-8, 1e-15)


def tiny(dtype: torch.dtype = torch.float32) -> Tensor:
    """Small numbers, enough of them to fill vector registers."""
    return torch.tensor(TINY * 8, dtype=torch.float64).to(dtype)


@case("bug")
def erf_of_tiny() -> tuple[Any, ...]:
    """The vectorised erf cancels near zero: no digit is right below 1e-8."""
    return (lambda x: torch.erf(x)), tiny()


@case("bug")
def expm1_of_tiny() -> tuple[Any, ...]:
    """exp(x) - 1 is zero below the unit roundoff (pytorch/pytorch#189803)."""
    return (lambda x: torch.expm1(x)), tiny()


@case("bug")
def expm1_of_tiny_bf16() -> tuple[Any, ...]:
    """The same in bfloat16, computed in float32."""
    return (lambda x: torch.expm1(x)), tiny(torch.bfloat16)


@case("bug")
def acosh_overflows() -> tuple[Any, ...]:
    """The square of the argument overflows."""
    return (lambda x: torch.acosh(x)), torch.tensor([1e30, 1e20, 3e38, 2.0] * 8)


@case("bug")
def addmm_with_beta_zero() -> tuple[Any, ...]:
    """With beta = 0 the first operand is ignored, NaN and all (pytorch/pytorch#196596)."""
    return (lambda x, a, b: torch.addmm(x, a, b, beta=0)), torch.full((4,), float("nan")), normal(1, 4), normal(4, 4)


@case("bug")
def addmm_with_alpha_zero() -> tuple[Any, ...]:
    """With alpha = 0 the product is ignored."""
    return (lambda x, a, b: torch.addmm(x, a, b, alpha=0)), normal(4), torch.full((1, 4), float("nan")), normal(4, 4)


@case("bug", "exception")
def shift_of_bool() -> tuple[Any, ...]:
    """bool << 1 works in eager only."""
    return (lambda x: (x > 1) << 1), torch.arange(4.0)


@case("bug", "exception")
def round_int8_to_decimals() -> tuple[Any, ...]:
    """Eager has no kernel for it (pytorch/pytorch#197554)."""
    return (lambda x: torch.round(x, decimals=-1)), torch.tensor([1, 14, 15, 27], dtype=torch.int8)


@case("bug", "exception")
def mixed_linear_dtypes() -> tuple[Any, ...]:
    """Eager refuses to multiply half and float matrices (pytorch/pytorch#141865)."""
    return seeded(lambda: torch.nn.Linear(1, 1).eval()), torch.ones(1, 1, dtype=torch.float16)
