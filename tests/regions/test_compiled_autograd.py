"""Compiled autograd: a backward pass that Dynamo captures is a region as others are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import checked_backend as cb
from tests.support import faults
from tests.support.region_tools import agreed, checked, found, gathered

# torch's own, where compiled autograd looks at saved results
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


@pytest.fixture(autouse=True)
def compiled_autograd() -> Iterator[None]:
    with torch._dynamo.config.patch(compiled_autograd=True):
        yield


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def gradients(model: nn.Module, step: Callable[[torch.Tensor], None], times: int = 3) -> list[torch.Tensor]:
    for number in range(times):
        step(torch.linspace(-1, 1 + number, 24).view(6, 4))
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def training(model: nn.Module) -> Callable[[torch.Tensor], None]:
    def step(x: torch.Tensor) -> None:
        model(x).square().sum().backward()

    return step


@pytest.mark.more
@pytest.mark.parametrize(("compiler", "in_backward"), [("eager", False), ("aot_eager", True)])
def test_compiled_autograd_agrees_and_accumulates_once(compiler: str, in_backward: bool) -> None:
    bare, model = net(), net()
    expected = gradients(bare, torch.compile(training(bare), backend=compiler))
    actual: list[torch.Tensor] = []
    compiled = checked(training(model), compiler, gradients=in_backward)
    assert agreed(gathered(lambda: actual.extend(gradients(model, compiled))))
    assert len(actual) == len(expected) == 4
    assert all(map(torch.equal, actual, expected))


@pytest.mark.parametrize("in_backward", [True, False])
def test_a_wrong_backward_is_found_under_compiled_autograd(in_backward: bool) -> None:
    model = net()
    wrong = faults.wrong_operator("aten.tanh_backward.default", lambda result: result * 1.01, "aot")
    compiled = checked(training(model), wrong, gradients=in_backward)
    report = gathered(lambda: gradients(model, compiled))
    assert {detail for detail, _ in found(report)} & {"logic", "precision"}, str(report)


def captured(model: nn.Module, compiled: Callable[..., torch.Tensor], backend: Any, **options: Any) -> cb.Report:
    """Backward passes, three of them, which compiled autograd hands to a backend."""
    capture = torch.compile(backend=backend, **options)

    def step(x: torch.Tensor) -> None:
        with torch._dynamo.compiled_autograd._enable(capture):
            compiled(x).square().sum().backward()

    return gathered(lambda: gradients(model, step))


@pytest.mark.parametrize(
    ("backend", "answer"), [("aot_eager", "record"), ("aot_eager", "fallback"), ("numcheck", "record")]
)
def test_a_backward_pass_that_must_be_one_graph_is_not_watched_and_that_is_told(backend: str, answer: str) -> None:
    bare, model = net(), net()
    options = {"compiler": "aot_eager"} if backend == "numcheck" else None
    plain, compiled = torch.compile(bare, backend="aot_eager"), checked(model, "aot_eager", on_divergence=answer)
    for _ in range(2):  # in the second one nothing is captured anew
        report = captured(model, compiled, backend, fullgraph=True, options=options)
        assert not found(report), str(report)
        assert report.verdict is cb.Verdict.INCONCLUSIVE
        assert [skip.subject for skip in report.coverage.skipped if "fullgraph" in skip.reason] == ["gradients"]
        captured(bare, plain, "aot_eager", fullgraph=True)
    for expected, actual in zip(bare.parameters(), model.parameters(), strict=True):
        assert torch.equal(actual.grad, expected.grad)


def test_passes_that_are_watched_elsewhere_make_up_for_those_in_one_graph() -> None:
    model = net()
    compiled = checked(model, "aot_eager")

    def run() -> None:
        captured(model, compiled, "aot_eager", fullgraph=True)
        compiled(torch.ones(6, 4)).sum().backward()

    assert agreed(gathered(run))


def test_a_wrong_backward_is_found_where_its_graph_may_be_broken() -> None:
    model = net()
    wrong = faults.wrong_operator("aten.tanh_backward.default", lambda result: result * 1.01, "aot")
    report = captured(model, checked(model, "aot_eager"), wrong)
    assert {detail.partition(".")[0] for detail, _ in found(report)} == {"logic"}, str(report)


def test_check_under_compiled_autograd() -> None:
    model = net()

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().sum()
        loss.backward()
        return loss.detach()

    report = cb.check(step, (torch.ones(6, 4),), compiler="aot_eager")
    assert not found(report), str(report)
