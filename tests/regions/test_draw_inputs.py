"""What goes into a draw is compared as values: other probabilities fail, whatever is drawn from them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.distributions import Dirichlet, Gamma, Normal

from tests.support import faults
from tests.support.region_tools import agreed, checked, found, gathered

# Dynamo itself makes an object of the custom function that torch's Dirichlet calls
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")

Program = Callable[[torch.Tensor], Any]

PROGRAMS: dict[str, tuple[Program, str]] = {
    "multinomial": (lambda x: torch.multinomial(torch.softmax(x, -1), 3), "aten._softmax.default"),
    "bernoulli": (lambda x: torch.bernoulli(torch.sigmoid(x)), "aten.sigmoid.default"),
    "poisson": (lambda x: torch.poisson(torch.exp(x)), "aten.exp.default"),
    "normal.0": (lambda x: torch.normal(torch.tanh(x), torch.ones_like(x)), "aten.tanh.default"),
    "normal": (lambda x: torch.normal(0.0, torch.exp(x)), "aten.exp.default"),
    "binomial.1": (lambda x: torch.binomial(torch.full_like(x, 9.0), torch.sigmoid(x)), "aten.sigmoid.default"),
    "sample_dirichlet": (lambda x: Dirichlet(torch.exp(x), validate_args=False).rsample(), "aten.exp.default"),
    "standard_gamma": (
        lambda x: Gamma(torch.exp(x), torch.ones_like(x), validate_args=False).rsample(),
        "aten.exp.default",
    ),
    "bernoulli in place": (lambda x: torch.empty_like(x).bernoulli_(torch.sigmoid(x)), "aten.sigmoid.default"),
    "dropout": (lambda x: x * torch.bernoulli(torch.sigmoid(x.mean()).expand_as(x)), "aten.sigmoid.default"),
}

SCALED: dict[str, tuple[Program, str]] = {
    "exponential": (lambda x: torch.empty_like(x).exponential_() / torch.exp(x), "aten.exp.default"),
    "geometric": (lambda x: torch.empty_like(x).geometric_(0.3) * torch.exp(x), "aten.exp.default"),
    "log_normal": (lambda x: torch.empty_like(x).log_normal_(0.5, 0.3) * torch.exp(x), "aten.exp.default"),
    "cauchy": (lambda x: torch.empty_like(x).cauchy_(0.5, 0.3) * torch.exp(x), "aten.exp.default"),
    "normal": (lambda x: Normal(x, torch.exp(x), validate_args=False).rsample(), "aten.exp.default"),
    "dropout by comparison": (lambda x: x * (torch.rand_like(x) < torch.sigmoid(x.mean())), "aten.sigmoid.default"),
}
"""What is drawn does not depend on what was computed; what is made of it does."""


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
    assert f"input[{name.partition(' ')[0].replace('dropout', 'bernoulli')}]" in {
        subject for _, subject in found(report)
    }, str(report)


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_right_parameters_of_a_draw_pass(name: str, compiler: str) -> None:
    report = agreed(gathered(lambda: checked(PROGRAMS[name][0], compiler)(x())))
    assert report.coverage.checked["inputs of random operators"] >= 1


@pytest.mark.parametrize("name", SCALED)
def test_what_is_made_of_draws_that_depend_on_no_value_is_compared_itself(name: str) -> None:
    program, operator = SCALED[name]
    wrong = faults.wrong_operator(operator, lambda made: made / 1.3, "aot")
    assert ("logic", "output[0]") in found(gathered(lambda: checked(program, wrong)(x())))
    assert agreed(gathered(lambda: checked(program, "aot_eager")(x())))


@pytest.mark.parametrize("draw", ["bernoulli", "binomial.1"])
def test_probabilities_too_small_by_a_factor_fail(draw: str) -> None:
    program, operator = PROGRAMS[draw]
    wrong = faults.wrong_operator(operator, lambda made: made / 1.3, "aot")
    assert ("logic", f"input[{draw}]") in found(gathered(lambda: checked(program, wrong)(x())))


KERNELS: dict[str, Program] = {
    "multinomial": lambda x: torch.nn.functional.embedding(
        torch.multinomial(torch.softmax(x, -1), 1), torch.arange(40.0).view(20, 2)
    ),
    "bernoulli": lambda x: x * torch.bernoulli(torch.sigmoid(x)),
    "poisson": lambda x: torch.poisson(torch.exp(x)),
    "normal": lambda x: torch.normal(torch.sigmoid(x), torch.exp(x)),
    "_standard_gamma": lambda x: torch._standard_gamma(torch.exp(x)),
}


def draws_sharper(draw: str) -> Callable[..., Any]:
    """A compiler whose draws use other parameters than they are given."""

    def compiler(gm: torch.fx.GraphModule, _example_inputs: Sequence[Any]) -> Callable[..., Any]:
        wrong = copy.deepcopy(gm)
        for node in wrong.graph.nodes:
            if getattr(node.target, "__name__", "") == draw:
                with wrong.graph.inserting_before(node):
                    node.args = (wrong.graph.call_function(sharper, (node.args[0],)), *node.args[1:])
        wrong.recompile()
        return wrong.forward

    return compiler


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("draw", KERNELS)
def test_draws_by_other_parameters_than_are_given_fail(draw: str, dtype: torch.dtype) -> None:
    if draw == "_standard_gamma" and dtype is torch.bfloat16:
        pytest.skip("torch has no kernel for it")
    report = gathered(lambda: checked(KERNELS[draw], draws_sharper(draw))(x().to(dtype)))
    assert ("rng.stream", f"drawn[{draw.removeprefix('_')}]") in found(report)
    (finding,) = [each for each in report.findings if each.subject.startswith("drawn")]
    assert "test_draw_inputs.py" in str(finding.source)
    assert agreed(gathered(lambda: checked(KERNELS[draw], "aot_eager")(x().to(dtype))))


def test_parameters_within_rounding_accuse_nobody() -> None:
    rounded = faults.wrong_operator("aten._softmax.default", off_by_a_rounding, "aot")
    assert not found(gathered(lambda: checked(PROGRAMS["multinomial"][0], rounded)(x())))
