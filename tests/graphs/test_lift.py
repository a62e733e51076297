"""Graphs that hold what they write to, as those of compiled optimizers do: the user's tensors change once."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn

import checked_backend as cb
from checked_backend.graphs.lift import lift_written_attributes
from tests.support import faults

STEPS = 3

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.1),
    "adamw foreach": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, foreach=True),
}


def trained(make: Callable[[Any], torch.optim.Optimizer], compile_step: Callable[[Any], Any] | None) -> list[Any]:
    """The parameters after some steps, the optimizer's step compiled or not; the gradients are the same in all runs."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = make(model.parameters())
    step = optimizer.step if compile_step is None else compile_step(optimizer.step)
    for number in range(STEPS):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 0.1 * (number + 1))
        step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def checking(compiler: Any) -> Callable[[Any], Any]:
    options = {"compiler": compiler, "on_divergence": "record", "localize": False}
    return lambda step: torch.compile(step, backend="numcheck", options=options)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_checked_optimizer_steps_once(name: str) -> None:
    with cb.collect() as session:
        checked = trained(OPTIMIZERS[name], checking("aot_eager"))
    unchecked = trained(OPTIMIZERS[name], lambda step: torch.compile(step, backend="aot_eager"))
    for mine, theirs, plain in zip(checked, unchecked, trained(OPTIMIZERS[name], None), strict=True):
        assert torch.equal(mine, theirs)
        torch.testing.assert_close(mine, plain)
    assert session.report.verdict is cb.Verdict.PASS, str(session.report)
    assert session.report.coverage.checked["mutated inputs"] >= 4 * STEPS


@faults.runs
def faster(forward: Callable[..., Any], *args: Any) -> Any:
    """Wrong: it moves one parameter too far."""
    returned = forward(*args)
    args[-1].mul_(1.01)
    return returned


def test_a_wrong_step_is_found_in_the_parameter() -> None:
    plain = torch.optim.SGD
    with cb.collect() as session:
        trained(lambda parameters: plain(parameters, lr=0.1, foreach=False), checking(faster))
    findings = [finding for finding in session.report.findings if finding.kind.fails]
    assert findings
    assert {finding.kind for finding in findings} == {cb.Kind.MUTATION}
    (subject,) = {finding.subject for finding in findings}
    assert subject.startswith("mutated[")
    assert "params" in subject


def test_what_fails_is_undone_in_the_users_tensors_where_eager_is_asked_for() -> None:
    options = {"compiler": faster, "on_divergence": "fallback", "localize": False}
    make: Callable[[Any], torch.optim.Optimizer] = lambda parameters: torch.optim.SGD(  # noqa: E731
        parameters, lr=0.1, foreach=False
    )
    fallen_back = trained(make, lambda step: torch.compile(step, backend="numcheck", options=options))
    for mine, plain in zip(fallen_back, trained(make, None), strict=True):
        torch.testing.assert_close(mine, plain, rtol=1e-6, atol=1e-7)  # as eager, up to how Dynamo traces it


class Scaled(nn.Module):
    """Holds a tensor for a graph to take as an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((3,), 2.0), requires_grad=False)


def graph(change: Callable[[fx.Graph, fx.Node, fx.Node], fx.Node]) -> fx.GraphModule:
    made = fx.Graph()
    x, scale = made.placeholder("x"), made.get_attr("scale")
    made.output((change(made, x, scale),))
    return fx.GraphModule(Scaled(), made)


WRITES: dict[str, tuple[Callable[[fx.Graph, fx.Node, fx.Node], fx.Node], bool]] = {
    "method": (lambda g, x, s: g.call_method("add_", (s, x)), True),
    "double underscore": (lambda g, x, s: g.call_method("__add__", (s, x)), False),
    "in-place operator": (lambda g, x, s: g.call_function(torch._ops.ops.aten.add_.Tensor, (s, x)), True),
    "operator": (lambda g, x, s: g.call_function(torch._ops.ops.aten.add.Tensor, (s, x)), False),
    "function": (lambda g, x, s: g.call_function(torch.relu_, (s,)), True),
    "pure function": (lambda g, x, s: g.call_function(torch.mul, (s, x)), False),
    "out": (lambda g, x, s: g.call_function(torch.mul, (s, x), {"out": s}), True),
    "iadd": (lambda g, x, s: g.call_function(operator.iadd, (s, x)), True),
    "unknown": (lambda g, x, s: g.call_function(copy.copy, (s,)), True),
}


@pytest.mark.parametrize("name", WRITES)
def test_attributes_are_lifted_only_where_something_may_write(name: str) -> None:
    change, lifts = WRITES[name]
    gm = graph(change)
    code, x = gm.code, torch.ones(3)
    lifted, examples, held = lift_written_attributes(gm, [x])
    assert gm.code == code
    if not lifts:
        assert lifted is gm
        assert (list(examples), held) == ([x], ())
        return
    assert held[0] is gm.scale
    assert len(examples) == 2
    assert not lifted.graph.find_nodes(op="get_attr")
    assert not list(lifted.named_parameters())
    (result,) = lifted(x, torch.full((3,), 2.0))
    assert torch.equal(gm.scale, torch.full((3,), 2.0))
    assert torch.equal(result, gm(x)[0])
