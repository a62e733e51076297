"""How an error flows through a graph: the operator at fault makes it, later ones inherit it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from checked_backend.diagnose.localize import flow as module
from checked_backend.diagnose.localize.flow import error_flow, relative
from checked_backend.diagnose.localize.probe import probe, worth_exposing
from checked_backend.diagnose.localize.subgraph import calls_of, part_of, tensors_made
from checked_backend.findings import NodeError
from tests.support import faults
from tests.support.locate_tools import traced

X = torch.linspace(-2, 2, 24).reshape(4, 6)


def program(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    hidden = torch.tanh(x.t())
    wrong = torch.relu(hidden)
    return torch.cos(x), (wrong * 2).softmax(-1)


def spoiled(factor: float = 1.01) -> Callable[..., Any]:
    """A compiler whose relu multiplies its result."""
    return faults.wrong_operator("aten.relu.default", lambda value: value * factor)


def flow_of(gm: torch.fx.GraphModule, compiler: Callable[..., Any], at_fault: str) -> tuple[NodeError, ...]:
    """The flow of an error, as a compiler makes it in a graph whose inner tensors are results, too."""
    inner = [made for node in calls_of(gm) if worth_exposing(node) for made in tensors_made(node)]
    exposed, _ = part_of(gm, calls_of(gm), inner)
    torch.manual_seed(0)
    made = dict(zip([node.name for node in inner], compiler(exposed, (X,))(X), strict=True))
    return error_flow(gm, (X,), made, at_fault)


def by_name(found: Sequence[NodeError]) -> dict[str, NodeError]:
    return {one.name: one for one in found}


def test_the_operator_at_fault_makes_the_error_and_later_ones_inherit_it() -> None:
    found = by_name(flow_of(traced(program, X), spoiled(), "relu"))
    assert list(found) == ["tanh", "relu", "cos", "mul", "_softmax"]
    assert found["relu"].error == pytest.approx(0.01, rel=1e-3)
    assert found["relu"].own == pytest.approx(0.01, rel=1e-3)
    assert found["mul"].error == pytest.approx(0.01, rel=1e-3)
    assert found["mul"].own == 0.0
    assert found["_softmax"].error > 1e-4
    assert found["tanh"].error == found["cos"].error == 0.0
    assert found["relu"].inputs == ("tanh",)
    assert all(one.noise is not None and one.noise < 1e-6 for one in found.values())
    assert found["relu"].op == "aten.relu.default"


def test_views_are_no_operators_of_their_own() -> None:
    """The transposition is not listed; what reads it is linked to what is before it."""
    found = by_name(flow_of(traced(lambda x: torch.relu(torch.sin(x).t()), X), spoiled(), "relu"))
    assert list(found) == ["sin", "relu"]
    assert found["relu"].inputs == ("sin",)


def test_of_an_operator_with_several_results_each_is_listed() -> None:
    def normed(x: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten.native_layer_norm(torch.relu(x), [6], None, None, 1e-5)[0]

    item = by_name(flow_of(traced(normed, X), spoiled(2.0), "relu"))["getitem"]
    assert (item.op, item.inputs, item.own) == ("aten.native_layer_norm.default", ("relu",), 0.0)


def test_a_graph_in_which_the_error_does_not_show_has_no_flow() -> None:
    assert flow_of(traced(program, X), spoiled(1.0), "relu") == ()
    assert flow_of(traced(program, X), spoiled(), "tanh") == ()  # it is right


def test_too_large_a_graph_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_BYTES", 100)
    assert flow_of(traced(program, X), spoiled(), "relu") == ()


@pytest.mark.parametrize("place", [0, 60, 199])
def test_of_many_operators_those_around_the_fault_and_the_last_are_kept(place: int) -> None:
    def long(x: torch.Tensor) -> torch.Tensor:
        for number in range(200):
            x = torch.relu(x) if number == place else torch.sin(x)
        return x

    found = flow_of(traced(long, X), spoiled(), "relu")
    assert len(found) == module.MOST_NODES
    names = [one.name for one in found]
    assert "relu" in names
    assert found[-1].name == ("relu" if place == 199 else "sin_198")
    assert all(set(one.inputs) <= set(names) for one in found)


def test_nan_on_one_side_is_infinite() -> None:
    assert by_name(flow_of(traced(program, X), spoiled(math.nan), "relu"))["relu"].error == math.inf


def test_draws_are_the_same_on_both_sides_and_nothing_is_left_changed() -> None:
    def drops(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(torch.ops.aten.native_dropout(x, 0.5, True)[0])

    kept, threads = X.clone(), torch.get_num_threads()
    found = by_name(flow_of(traced(drops, X), spoiled(), "relu"))
    assert found["relu"].error == found["relu"].own == pytest.approx(0.01, rel=1e-3)
    assert found["getitem"].error == 0.0
    assert found["getitem"].own is None  # run by itself, it draws other numbers
    assert torch.equal(X, kept)
    assert torch.get_num_threads() == threads
    assert torch.is_grad_enabled()


def test_what_finds_the_operator_has_seen_the_flow() -> None:
    graph = traced(program, X)
    assert probe(graph, (X,), spoiled(), limit=1 << 20).finding.flow == flow_of(graph, spoiled(), "relu")


@pytest.mark.parametrize(
    ("expected", "actual", "error"),
    [
        ([1.0, 1.0], [1.0, 1.0], 0.0),
        ([3.0, 4.0], [3.0, 4.5], 0.1),
        ([0.0, 0.0], [0.0, 1.0], math.inf),
        ([math.inf, math.nan], [math.inf, math.nan], 0.0),
        ([1.0, math.nan], [1.0, 2.0], math.inf),
    ],
)
def test_errors_are_relative(expected: list[float], actual: list[float], error: float) -> None:
    assert relative(torch.tensor(expected), torch.tensor(actual)) == pytest.approx(error)


def test_shapes_that_differ_and_integers_and_nothing() -> None:
    assert relative(torch.ones(2), torch.ones(3)) == math.inf
    assert relative(torch.ones(0), torch.ones(0)) == 0.0
    assert relative(torch.tensor([2, 2]), torch.tensor([2, 4])) == pytest.approx(0.5**0.5)
    assert relative(torch.tensor([True]), torch.tensor([False])) == 1.0
