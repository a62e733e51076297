"""Whether a call in a Dynamo graph writes to what it is given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

from checked_backend.graphs.effects import has_effects, may_write_undeclared


@pytest.mark.parametrize(
    ("function", "given", "writing"),
    [
        (F.dropout, (0.5, True, True), True),  # as `torch.nn.Dropout(inplace=True)` passes it
        (F.dropout, (0.5, True, False), False),
        (F.dropout, (0.5, True), False),
        (F.leaky_relu, (0.1, True), True),
        (F.selu, (True,), True),
        (torch.sum, (0, True), False),
        (torch.relu_, (), True),
    ],
)
def test_functions_that_are_told_to_write_in_place_do(
    function: Callable[..., Any], given: tuple[Any, ...], writing: bool
) -> None:
    graph = torch.fx.Graph()
    assert has_effects(graph.call_function(function, (graph.placeholder("x"), *given))) is writing


@torch.library.custom_op("test_effects::clear", mutates_args=())
def clear(x: torch.Tensor) -> torch.Tensor:
    """An operator that does not say what it writes to."""
    x.zero_()
    return x.clone()


clear.register_fake(torch.empty_like)


def in_a_branch(x: torch.Tensor, write: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    return torch.cond(x.sum() > 0, write, torch.cos, (x,))


@pytest.mark.parametrize(
    ("program", "undeclared"),
    [
        (lambda x: x.sin().add_(1).split(2)[0], False),
        (lambda x: clear(x), True),
        (lambda x: torch.native_batch_norm(x, None, None, x[0], x[0], True, 0.1, 1e-5)[0], True),
        (lambda x: in_a_branch(x, torch.sin), False),
        (lambda x: in_a_branch(x, clear), True),
    ],
)
def test_calls_of_torchs_own_operators_say_what_they_write_to(
    program: Callable[[torch.Tensor], Any], undeclared: bool
) -> None:
    assert may_write_undeclared(make_fx(program)(torch.randn(4, 4))) is undeclared


def test_calls_of_python_do_not() -> None:
    assert may_write_undeclared(torch.fx.symbolic_trace(lambda x: torch.sin(x)))


def test_a_higher_order_operator_without_a_body_may_write_to_anything() -> None:
    graph = torch.fx.Graph()
    graph.call_function(torch.ops.higher_order.auto_functionalized, (graph.get_attr("constant"),))
    graph.output(())
    assert may_write_undeclared(torch.fx.GraphModule({"constant": torch.ones(1)}, graph))
