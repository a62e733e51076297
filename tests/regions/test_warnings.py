"""Warnings that the program's filters make errors: eager may warn where compiled code does not."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from tests.support.region_tools import agreed, checked, found, gathered


@torch.library.custom_op("test_warnings::warned", mutates_args=())
def warned(x: torch.Tensor) -> torch.Tensor:
    warnings.warn("of this tensor", UserWarning, stacklevel=2)
    return x.clone()


warned.register_fake(torch.empty_like)
warned.register_autograd(lambda _ctx, gradient: gradient.clone())


@torch.library.custom_op("test_warnings::warned_in_backward", mutates_args=())
def warned_in_backward(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


warned_in_backward.register_fake(torch.empty_like)
warned_in_backward.register_autograd(lambda _ctx, gradient: warned(gradient))

PROGRAMS = {"forward": lambda x: warned(x * 2).sin(), "backward": lambda x: warned_in_backward(x * 2).sin()}


class WithoutWarnings(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        with torch.enable_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ctx.x, ctx.out = x, run(x)[0]
        return ctx.out.detach().clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return None, torch.autograd.grad(ctx.out, ctx.x, gradient)[0]


def silent(factor: float) -> Callable[..., Any]:
    def compiler(gm: torch.fx.GraphModule, _example_inputs: Sequence[Any]) -> Callable[..., Any]:
        return lambda x: (WithoutWarnings.apply(gm.forward, x) * factor,)

    return compiler


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_warning_of_eagers_is_no_exception_that_is_missing(name: str, dtype: torch.dtype) -> None:
    def run(factor: float) -> None:
        compiled = checked(PROGRAMS[name], silent(factor))
        for _ in range(2):
            before = [*warnings.filters]
            compiled(torch.rand(4, dtype=dtype, requires_grad=True)).sum().backward()
            assert [*warnings.filters] == before

    report = agreed(gathered(lambda: run(1.0)))
    assert report.coverage.checked["gradients"] == 2
    assert ("logic", "output[0]") in found(gathered(lambda: run(1.1)))


def test_a_warning_of_both_is_the_programs_own() -> None:
    compiled = checked(PROGRAMS["forward"], lambda gm, _inputs: gm.forward)
    with pytest.raises(UserWarning, match="of this tensor"):
        agreed(gathered(lambda: compiled(torch.rand(4))))
