"""The operator check within a region's check: the limits that it states, and what remains without it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import checked_backend as cb
from tests.calibration.compilers import candidate
from tests.support import faults
from tests.support.low_precision import at_16_bits, times
from tests.support.region_tools import agreed, checked, gathered


def test_own_precision_power_is_that_of_the_worst_operator() -> None:
    """Rounding otherwise changes what is seen, not what is stated."""

    def nudged(tensor: torch.Tensor) -> torch.Tensor:
        return torch.where(torch.arange(tensor.numel()).reshape(tensor.shape) % 7 == 0, tensor * 1.004, tensor)

    x = torch.randn(40, 50, dtype=torch.bfloat16)
    report = gathered(lambda: checked(lambda x: torch.tanh(x).exp(), faults.spoiled_output(at_16_bits(nudged)))(x))
    assert agreed(report)
    assert 0.004 < report.coverage.own_precision_limit["output[0]"] < 0.03


def test_where_noise_hides_all_and_operators_are_not_checked_nothing_is_passed() -> None:
    """Cancellation: in bfloat16 the result is all noise, and in float64 it is right."""

    def compiler(gm: torch.fx.GraphModule, given: Sequence[Any]) -> Callable[..., Any]:
        if len(gm.graph.find_nodes(op="output")[0].args[0]) > 1:
            raise RuntimeError("no more than one result")
        return faults.spoiled_output(at_16_bits(lambda tensor: tensor * 1.5))(gm, given)

    x = torch.randn(2000, dtype=torch.bfloat16)
    report = gathered(lambda: checked(lambda x: (x * 3 + 100) - x * 2 - 100 - x * 0.999, compiler)(x))
    assert report.verdict is cb.Verdict.INCONCLUSIVE, str(report)
    [skip] = [skip for skip in report.coverage.skipped if skip.matters]
    assert skip.subject == "output[0]"
    assert "no more than one result" in skip.reason


def standardised(x: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    shifted = x * 1.0 + b
    variance, mean = torch.var_mean(shifted)
    return (shifted - mean) / (variance + 1e-5).sqrt()


def shifted_exponentially(x: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return standardised(x, b.exp() - 1)


def given() -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(size, dtype=torch.bfloat16).requires_grad_() for size in ((256, 128), (1,)))


@pytest.mark.parametrize("program", [standardised, shifted_exponentially])
@pytest.mark.parametrize("name", ["fused", "everything"])
def test_a_gradient_that_is_zero_but_for_rounding_is_not_judged_by_its_operator(program: Any, name: str) -> None:
    """Eager rounds a small mean away from each of 32,768 terms, and the sum has them all."""
    report = cb.check(program, given(), compiler=candidate(name), localize=False)
    assert report.verdict is cb.Verdict.PASS, str(report)


def test_an_operator_whose_gradient_reaches_others_is_judged_all_the_same() -> None:
    wrong = faults.wrong_operator("aten.exp.default", times(1.05), "aot")
    report = cb.check(lambda x, b: standardised(x * b.exp(), b) * x.exp(), given(), compiler=wrong, localize=False)
    assert report.verdict is cb.Verdict.FAIL, str(report)


@pytest.mark.parametrize(
    ("program", "sizes"),
    [
        (lambda x, b: (x + b).mean(1), [(8, 300, 64), (64,)]),
        (lambda x, b: F.linear(x, b).mean(1), [(8, 300, 64), (64, 64)]),
        (lambda x: (x * 2 + 0.1).mean(-1), [(64, 4096)]),
    ],
    ids=["a gradient that is repeated", "product", "a constant is added"],
)
def test_roundings_that_all_go_the_same_way_may_be_left_out(program: Any, sizes: Sequence[Any]) -> None:
    given = tuple(torch.randn(size, dtype=torch.bfloat16).requires_grad_() for size in sizes)
    report = cb.check(program, given, compiler=candidate("fused"), localize=False)
    assert agreed(report), str(report)
    wrong = faults.wrong_operator("aten.mean.dim", times(1.05), "aot")
    assert cb.check(program, given, compiler=wrong, localize=False).verdict is cb.Verdict.FAIL
