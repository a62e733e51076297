"""Several steps with an optimizer: clean runs agree, a wrong gradient is named where it first shows."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count, cycle
from typing import Any

import pytest
import torch
from torch import nn

import checked_backend as cb
from tests.support import faults
from tests.support.check_tools import Net, agreed, batch, found, only, rounding_otherwise

OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "sgd with momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adam": partial(torch.optim.Adam, lr=0.01),
    "adamw": torch.optim.AdamW,
    "rmsprop": torch.optim.RMSprop,
    "adagrad": torch.optim.Adagrad,
    "lbfgs": torch.optim.LBFGS,
}


class ConvNet(nn.Module):
    """Convolution, batch norm, pooling; returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.GELU(), nn.AdaptiveAvgPool2d(2))
        self.head = nn.Linear(16, 5)

    def forward(self, image: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(self.body(image).flatten(1)), label)


def encoder() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True), (batch(2, 5, 16),)


def conv_net() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return ConvNet(), (batch(4, 3, 8, 8), torch.randint(5, (4,)))


def mlp() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return Net(), (batch(),)


@pytest.mark.more
@pytest.mark.parametrize(("name", "steps"), [("sgd with momentum", 4), ("adam", 10), ("rmsprop", 4), ("lbfgs", 2)])
def test_steps_of_a_compiler_that_rounds_otherwise_agree(name: str, steps: int) -> None:
    model, args = mlp()
    report = cb.check(model, args, compiler=rounding_otherwise, iterations=steps, optimizer=OPTIMIZERS[name])
    agreed(report, program_runs=steps, gradients=6 * steps)
    assert any(region.checked_calls >= steps for region in report.coverage.regions)


@pytest.mark.slow
@pytest.mark.inductor
@pytest.mark.parametrize(("name", "make"), [*zip(OPTIMIZERS, cycle([mlp, conv_net, encoder]), strict=False)])
def test_ten_steps_under_inductor_agree(name: str, make: Callable[[], Any]) -> None:
    model, args = make()
    report = cb.check(model, args, iterations=10, optimizer=OPTIMIZERS[name])
    assert report.verdict is not cb.Verdict.FAIL, str(report)
    if make is not encoder:  # attention hides its dropout in a kernel, so no control can replay it
        agreed(report, program_runs=10)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("optimizer", "how"), [(torch.optim.SGD, "python"), (torch.optim.Adam, "aot")])
def test_a_wrong_gradient_is_named_and_not_the_parameters_it_spoils(optimizer: Any, how: Any) -> None:
    wrong = faults.scaled_gradient("head.weight", how)
    finding = only(cb.check(Net(), (batch(),), compiler=wrong, iterations=4, optimizer=optimizer))
    assert (finding.kind, finding.subject) == (cb.Kind.LOGIC, "grad[head.weight]")
    assert finding.evidence["step"] == "1 of 4"
    assert "first in step 1 of 4" in finding.message


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "where"),
    [*zip(OPTIMIZERS, cycle([(encoder, "linear1.bias"), (mlp, "head.weight"), (conv_net, "body.0.weight")]))],
)
def test_a_wrong_gradient_is_named_under_every_optimizer(name: str, where: tuple[Callable[[], Any], str]) -> None:
    make, parameter = where
    model, args = make()
    wrong = faults.scaled_gradient(parameter, "python")
    finding = only(cb.check(model, args, compiler=wrong, iterations=4, optimizer=OPTIMIZERS[name]))
    assert (finding.detail, finding.subject) == ("logic", f"grad[{parameter}]")
    assert finding.evidence["step"] == "1 of 4"


class Spoiled(nn.Module):
    """Compiled, it differentiates its first layer's weight wrongly, which the graph itself says."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.first.weight
        if torch.compiler.is_compiling():
            weight = faults.SpoilGradient.apply(weight, lambda gradient: gradient * 1.01)
        return self.second(torch.tanh(nn.functional.linear(x, weight, self.first.bias)))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["adam", "lbfgs"])
def test_a_gradient_that_dynamos_graph_spoils_is_named_alone(name: str) -> None:
    """LBFGS mixes all gradients, and goes on from where the wrong one has led it: every parameter is wrong then."""
    finding = only(cb.check(Spoiled(), (batch(),), compiler="eager", iterations=2, optimizer=OPTIMIZERS[name]))
    assert finding.subject == "grad[first.weight]"
    assert finding.evidence["level"].startswith("Dynamo")


def test_the_step_in_which_a_gradient_is_first_wrong_is_told() -> None:
    passes = iter(range(100))
    wrong = faults.spoiled_gradient("head.bias", lambda gradient: gradient * 1.01 if next(passes) >= 2 else gradient)
    finding = only(cb.check(Net(), (batch(),), compiler=wrong, iterations=5, optimizer=torch.optim.Adam))
    assert finding.subject == "grad[head.bias]"
    assert finding.evidence["step"] == "3 of 5"


def test_a_parameter_that_is_baked_in_shows_in_the_second_step() -> None:
    train, stale = partial(torch.optim.SGD, lr=0.5), faults.stale_parameters
    finding = only(cb.check(nn.Linear(4, 4), (batch(3, 4),), compiler=stale, iterations=3, optimizer=train))
    assert finding.subject == "output[0]"
    assert finding.evidence["step"] == "2 of 3"


class Averaged(nn.Module):
    """Keeps a running average of its weight, in the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))
        self.average = nn.Parameter(torch.zeros(4), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.average.mul_(0.9).add_(self.weight.detach(), alpha=0.1)
        return (x * self.weight).sum()


def test_a_parameter_that_is_updated_wrongly_is_named() -> None:
    wrong = faults.wrong_mutation("average", "aot")
    finding = only(cb.check(Averaged(), (batch(4),), compiler=wrong, iterations=3, optimizer=torch.optim.SGD))
    assert (finding.kind, finding.subject) == (cb.Kind.MUTATION, "mutated[average]")


class TwoRegions(nn.Module):
    """Two regions, each with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(4))
        self.second = nn.Parameter(torch.randn(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * self.first
        torch._dynamo.graph_break()
        return y * self.second


def test_what_no_region_shows_is_found_in_the_whole_program() -> None:
    """The second region's code writes over a parameter that is no input of it, in the third step."""
    parameters: list[torch.Tensor] = []
    calls = iter(range(1000))

    @faults.runs
    def compiler(forward: Callable[..., Any], *args: Any) -> Any:
        seen = [arg for arg in args if isinstance(arg, nn.Parameter)]
        if next(calls) == 5:
            parameters[0].data.add_(0.5)
        parameters[:] = parameters or seen
        return forward(*args)

    report = cb.check(TwoRegions(), (batch(4),), compiler=compiler, iterations=4, optimizer=torch.optim.SGD)
    assert ("mutation", "param[first]") in found(report) or {f.subject for f in report.findings} == {"param[first]"}
    assert {finding.evidence["step"] for finding in report.findings} == {"3 of 4"}


def test_gradients_do_not_pile_up_over_iterations() -> None:
    norms: list[float] = []

    def spy(gradient: torch.Tensor) -> torch.Tensor:
        norms.append(gradient.abs().max().item())
        return gradient

    spying = faults.spoiled_gradient("bias", spy)
    agreed(cb.check(nn.Linear(4, 4), (batch(3, 4),), compiler=spying, iterations=3), gradients=6)
    norms.sort()
    assert norms[len(norms) // 2] < 6  # each a sum of three numbers of at most 2; few calls get larger ones


def test_every_output_is_differentiated() -> None:
    given, wrong = (batch(4, grad=True), batch(4, grad=True)), faults.scaled_gradient("y")
    assert found(cb.check(lambda x, y: (x * 2, y.sin()), given, compiler=wrong)) == {("logic", "grad[y]")}


def test_eager_and_compiled_train_parameters_of_their_own() -> None:
    model, x = Net(), batch()
    before = [tensor.clone() for tensor in model.state_dict().values()]
    agreed(cb.check(model, (x,), compiler="eager", iterations=3, optimizer=torch.optim.SGD))
    assert all(map(torch.equal, before, model.state_dict().values()))
    assert all(parameter.grad is None for parameter in model.parameters())


class Plain(torch.optim.Optimizer):
    """Gradient descent whose ``step`` takes no closure."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self) -> None:  # type: ignore[override]
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.sub_(parameter.grad, alpha=0.1)


def test_a_step_inside_of_the_program_rounds_otherwise() -> None:
    """The optimizer's state is keyed by parameters: their values are no names."""
    weight = nn.Parameter(torch.randn(4, 3))
    gradient, optimizer = torch.randn(4, 3), torch.optim.Adam([weight], lr=0.5)

    def step(optimizer: torch.optim.Optimizer) -> torch.Tensor:
        weight.grad = gradient.clone()
        optimizer.step()
        return weight.detach().clone()

    report = cb.check(lambda: step(optimizer), compiler="eager", gradients=False)
    assert {finding.detail for finding in report.findings} == {"precision.traced"}, str(report)
    assert all("tensor" not in finding.subject for finding in report.findings)
    sgd = torch.optim.SGD([weight], lr=0.5, momentum=0.9)

    counted = agreed(cb.check(lambda: step(sgd), compiler="eager", gradients=False, iterations=2))
    assert counted.coverage.checked["program runs"] == 2


def test_a_tensor_that_is_given_twice_is_trained_once() -> None:
    weight = torch.randn(3, requires_grad=True)
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        report = cb.check(torch.mul, (weight, weight), compiler="eager", iterations=2, optimizer=torch.optim.SGD)
    agreed(report, program_runs=2)
    assert not [entry for entry in shown if "duplicate parameters" in str(entry.message)]


class Broken(Plain):
    """Its step raises in the given call."""

    def __init__(self, params: Any, calls: Iterator[int], when: int) -> None:
        super().__init__(params)
        self.calls, self.when = calls, when

    def step(self, closure: Any) -> None:
        closure()
        if next(self.calls) == self.when:
            raise ValueError("no step")


def test_a_step_that_raises_in_one_run_only_is_a_finding() -> None:
    calls = count()
    report = cb.check(Net(), (batch(),), compiler="eager", optimizer=lambda params: Broken(params, calls, 1))
    assert found(report) == {("crash.running", "exception")}


def test_optimizers_that_cannot_be_used() -> None:
    model, x = Net(), batch()
    with pytest.raises(cb.OptionError, match="the optimizer's step raises: ValueError: no step"):
        cb.check(model, (x,), compiler="eager", optimizer=lambda params: Broken(params, count(), 0))
    with pytest.raises(cb.OptionError, match="takes 1 positional argument but 2 were given"):
        cb.check(model, (x,), compiler="eager", optimizer=Plain)
    with pytest.raises(cb.OptionError, match="copies of the module"):
        cb.check(model, (x,), compiler="eager", optimizer=lambda _: torch.optim.SGD(model.parameters()))
    with pytest.raises(cb.OptionError, match="it returned int"):
        cb.check(model, (x,), compiler="eager", optimizer=lambda _: 3)
    with pytest.raises(cb.OptionError, match="no parameter and no tensor argument"):
        cb.check(torch.sin, (x,), compiler="eager", optimizer=torch.optim.SGD)
    with pytest.raises(cb.OptionError, match="gradients, which are off"):
        cb.check(model, (x,), compiler="eager", optimizer=torch.optim.SGD, gradients=False)
    with pytest.raises(cb.OptionError, match="iterations got 0"):
        cb.check(model, (x,), compiler="eager", iterations=0)


class Counting(torch.optim.Optimizer):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
            for parameter in group["params"]:
                parameter.add_(parameter.grad, alpha=-group["lr"])


@pytest.mark.skipif(
    not torch.__version__.startswith(("2.11.", "2.12.", "2.13.")), reason="Dynamo sets it back (pytorch#182706)"
)
def test_what_dynamo_sets_in_an_optimizer_that_it_traces_is_told() -> None:
    module = torch.nn.Linear(3, 2)
    module(torch.randn(2, 3)).sum().backward()
    report = agreed(cb.check(Counting(module.parameters()).step, (), compiler="eager"))
    assert any("[capturable]]: Dynamo sets it" in note for note in report.coverage.notes)
    assert report.coverage.checked["mutated inputs"] == 2


def test_another_value_of_that_name_is_a_finding() -> None:
    def program(x: torch.Tensor, settings: dict[str, bool]) -> torch.Tensor:
        settings["capturable"] = torch.compiler.is_compiling()
        return x * 2

    assert only(cb.check(program, (batch(3), {}), compiler="eager")).subject == "mutated[settings[capturable]]"
