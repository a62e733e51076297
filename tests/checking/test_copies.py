"""What a program takes from outside of itself is the same tensor in eager and compiled, also inside of operators."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import faults
import pytest
import torch
from check_tools import agreed, found
from torch import nn
from torch._higher_order_ops.map import map as torch_map
from torch._higher_order_ops.scan import scan

import checked_backend as cb

weight = torch.randn(3, requires_grad=True)
layer = nn.Linear(3, 3)
held = {"weight": weight, "several": [weight]}


def row(x: torch.Tensor) -> torch.Tensor:
    return x * weight


def mapped(x: torch.Tensor) -> torch.Tensor:
    return torch_map(lambda one: one * weight, x)


def mapped_by_name(x: torch.Tensor) -> torch.Tensor:
    return torch_map(row, x)


def mapped_module(x: torch.Tensor) -> torch.Tensor:
    return torch_map(lambda one: layer(one), x)


def branch(x: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() > -1e9, lambda x: layer(x) * weight, lambda x: x - weight, (x,))


def scanned(x: torch.Tensor) -> Any:
    return scan(lambda carried, one: (carried + one * weight, carried * 1), torch.zeros(3), x)


def nested(x: torch.Tensor) -> torch.Tensor:
    def inner(y: torch.Tensor) -> torch.Tensor:
        return torch_map(lambda one: functools.partial(lambda a, b: a * b * weight, weight)(one), y)

    return inner(x)


def by_default(x: torch.Tensor, by: torch.Tensor = weight) -> torch.Tensor:
    return x * by * weight


def built_in(x: torch.Tensor) -> torch.Tensor:
    return torch.stack([*map(row, x)]) * held["weight"] * held["several"][0]


def transformed(x: torch.Tensor) -> torch.Tensor:
    return torch.func.vmap(lambda one: one * weight)(x) + torch.func.grad(lambda y: (y * weight).sum())(x)


def closed_over() -> Callable[..., Any]:
    own = torch.randn(3, requires_grad=True)
    return lambda x: torch_map(lambda one: one * own, x)


@pytest.mark.parametrize(
    "program",
    [
        mapped,
        mapped_by_name,
        mapped_module,
        branch,
        scanned,
        nested,
        by_default,
        built_in,
        transformed,
        closed_over(),
        functools.partial(row),
    ],
)
def test_what_a_program_takes_from_outside(program: Callable[..., Any]) -> None:
    agreed(cb.check(program, (torch.randn(2, 3, requires_grad=True),), compiler="aot_eager"), gradients=2)
    assert weight.grad is None
    assert layer.weight.grad is None


def test_a_wrong_gradient_of_it_is_found() -> None:
    x = torch.randn(2, 3, requires_grad=True)
    assert found(cb.check(mapped, (x,), compiler=faults.scaled_gradient("weight"))) == {("logic", "grad[weight]")}


def makes_a_class(x: torch.Tensor) -> torch.Tensor:
    return Named.scale(x)


class Named:
    where = __name__

    @staticmethod
    def scale(x: torch.Tensor) -> torch.Tensor:
        return x * weight


def asks_where_it_is(x: torch.Tensor) -> tuple[torch.Tensor, str]:
    return x * weight, __name__


def test_a_function_that_asks_for_its_module_is_answered() -> None:
    report = agreed(cb.check(asks_where_it_is, (torch.randn(3),), compiler="eager"))
    assert report.coverage.regions
    agreed(cb.check(makes_a_class, (torch.randn(3),), compiler="eager"))
