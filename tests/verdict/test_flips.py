"""Choices that rounding flips: ties, edges and draws cause no finding and hide none."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import checked_backend as cb
from tests.support import faults
from tests.support.noise_tools import in_float32, rounding_otherwise
from tests.support.region_tools import agreed, checked, found, gathered


def test_where_eager_has_flips_others_may_not_be_wrong() -> None:
    """Rounding changes the order of a few neighbours; that excuses no other places."""
    x = torch.rand(4000)
    off = faults.spoiled_output(lambda places: places + 1)
    assert found(gathered(lambda: checked(lambda x: (x + 1000).sort()[1], off)(x)))
    other = faults.instead(lambda x: (x + 1000).sort(stable=True)[1])
    assert agreed(gathered(lambda: checked(lambda x: (x + 1000).sort()[1], other)(x)))


def buckets(x: torch.Tensor, table: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """A bias for each distance, in logarithmic buckets: some distances are edges, in exact arithmetic."""
    places = (torch.log(torch.arange(1, 65).to(x.dtype) / 8) / math.log(16) * 8).long() + 10
    return torch.softmax(x @ w + table[places], -1)


def bucket_inputs(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(*shape).to(dtype) for shape in ((16, 32), (24,), (32, 64)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_choice_that_flips_hides_nothing_else(dtype: torch.dtype) -> None:
    inputs = bucket_inputs(dtype)
    off = faults.wrong_operator("aten.mm.default", lambda scores: scores * 1.03, how="aot")
    assert found(gathered(lambda: checked(buckets, off)(*inputs))) == {("logic", "output[0]")}
    report = agreed(gathered(lambda: checked(buckets, faults.spoiled_output(rounding_otherwise))(*inputs)))
    if dtype is torch.float32:
        assert max(report.coverage.detection_limit.values()) < 1e-4


def test_gradients_behind_a_choice_that_flips_are_compared() -> None:
    x, table, w = (tensor.requires_grad_() for tensor in bucket_inputs())

    def train(compiler: Any) -> cb.Report:
        torch._dynamo.reset()
        model = checked(buckets, compiler)
        return gathered(lambda: model(x, table, w).square().sum().backward())

    assert found(train(faults.scaled_gradient("w", "aot", 1.05))) == {("logic", "grad[w]")}
    assert agreed(train(faults.clean("aot")))


def test_what_is_computed_of_ties_accuses_nobody() -> None:
    """Half of what is rounded is a tie, so a compiler may choose otherwise."""
    inputs = torch.randint(-20, 20, (16, 32)) / 12, torch.randn(32, 64)
    assert agreed(gathered(lambda: checked(lambda x, w: (torch.round(x * 6) / 4) @ w, faults.clean("aot"))(*inputs)))


def test_another_choice_at_an_edge_is_no_bug() -> None:
    x, table, w = bucket_inputs()
    inputs = x, table * 0.02, w

    def rounding_down(quotient: torch.Tensor) -> torch.Tensor:
        return quotient * (1 - torch.finfo(quotient.dtype).eps)

    otherwise = faults.wrong_operator("aten.div.Tensor", rounding_down, how="aot")
    assert (torch.compile(buckets, backend=otherwise)(*inputs) / buckets(*inputs) - 1).abs().max() > 0.005
    assert agreed(gathered(lambda: checked(buckets, otherwise)(*inputs)))


TIES = {
    "places": lambda x: (x * 1.1).argmax(-1),
    "one of them": lambda x: torch.nn.functional.one_hot((x * 1.1).argmax(-1), 20).float(),
}


@pytest.mark.parametrize("name", TIES)
def test_what_is_nothing_but_ties_is_not_passed(name: str) -> None:
    x = torch.randint(0, 3, (64, 20)).float()
    nothing = faults.spoiled_output(torch.zeros_like)
    assert gathered(lambda: checked(TIES[name], nothing)(x)).verdict is not cb.Verdict.PASS
    assert agreed(gathered(lambda: checked(TIES[name], faults.clean())(x)))


@pytest.mark.parametrize("name", ["bernoulli", "multinomial", "normal"])
def test_draws_by_computed_values_accuse_nobody(name: str) -> None:
    program = {
        "bernoulli": lambda x: torch.bernoulli(torch.sigmoid(x * 1.1)),
        "multinomial": lambda x: torch.multinomial(torch.softmax(x * 1.1, -1), 4),
        "normal": lambda x: torch.normal(torch.tanh(x * 1.1), torch.sigmoid(x)),
    }[name]
    x = torch.randn(200, 50, dtype=torch.bfloat16)
    assert not found(gathered(lambda: checked(program, in_float32)(x)))
    assert agreed(gathered(lambda: checked(program, faults.clean())(x.float())))


def test_an_element_that_jumps_hides_no_others() -> None:
    """One comparison in the backward pass is a tie; gradients of other elements are as exact as ever."""

    def program(x: torch.Tensor) -> torch.Tensor:
        return (x * 1.1 - x[0] * 1.1).clamp(min=0)

    x = torch.randn(400, dtype=torch.bfloat16, requires_grad=True)
    leaking = faults.spoiled_gradient("x", lambda grad: grad + (grad == 0) * 0.1, "aot")
    assert found(gathered(lambda: checked(program, leaking)(x).square().sum().backward())) == {("logic", "grad[x]")}


def test_draws_by_computed_values_hide_no_wrong_logic_elsewhere() -> None:
    """What the float64 twin shows to be wrong is no draw that flipped."""

    def program(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.sin(x) * 1.1, torch.bernoulli(torch.sigmoid(x))

    off = faults.spoiled_output(lambda result: result * 1.01)
    assert found(gathered(lambda: checked(program, off)(torch.randn(40, 50)))) == {("logic", "output[0]")}
