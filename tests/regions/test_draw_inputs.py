"""What goes into a draw is compared as values: other probabilities fail, whatever is drawn from them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import faults
import pytest
import torch
from region_tools import agreed, checked, found, gathered

Program = Callable[[torch.Tensor], Any]

PROGRAMS: dict[str, tuple[Program, str]] = {
    "multinomial": (lambda x: torch.multinomial(torch.softmax(x, -1), 3), "aten._softmax.default"),
    "bernoulli": (lambda x: torch.bernoulli(torch.sigmoid(x)), "aten.sigmoid.default"),
    "poisson": (lambda x: torch.poisson(torch.exp(x)), "aten.exp.default"),
    "normal.0": (lambda x: torch.normal(torch.tanh(x), torch.ones_like(x)), "aten.tanh.default"),
}


def x() -> torch.Tensor:
    return torch.randn(30, 20, generator=torch.Generator().manual_seed(2))


def sharper(made: torch.Tensor) -> torch.Tensor:
    sharpened = made.abs() ** 1.3
    return sharpened / sharpened.amax(-1, keepdim=True)


def off_by_a_rounding(made: torch.Tensor) -> torch.Tensor:
    return made if made.dtype is torch.float64 else made * (1 + torch.finfo(made.dtype).eps)


@pytest.mark.parametrize("name", PROGRAMS)
def test_wrong_parameters_of_a_draw_fail(name: str) -> None:
    program, operator = PROGRAMS[name]
    wrong = faults.wrong_operator(operator, sharper, "aot")
    report = gathered(lambda: checked(program, wrong)(x()))
    assert f"input[{name}]" in {subject for _, subject in found(report)}, str(report)


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_right_parameters_of_a_draw_pass(name: str, compiler: str) -> None:
    report = gathered(lambda: checked(PROGRAMS[name][0], compiler)(x()))
    assert agreed(report)
    assert report.coverage.checked["inputs of random operators"] >= 1


def test_parameters_within_rounding_accuse_nobody() -> None:
    rounded = faults.wrong_operator("aten._softmax.default", off_by_a_rounding, "aot")
    assert not found(gathered(lambda: checked(PROGRAMS["multinomial"][0], rounded)(x())))
