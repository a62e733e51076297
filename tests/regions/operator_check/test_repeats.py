"""Leaving out of a region what it repeats."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from checked_backend.regions.operator_check.probe import values_of, without_repeats
from tests.support.region_tools import dynamo_graph


def layers(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    for _ in range(4):
        x = torch.relu(x @ w)
    return x.sum().exp()


def wider(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.relu(torch.relu(x @ w).double())


def squared(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (x @ w) * w + w * w  # gradients of one tensor are added up


def under_autocast(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        y = F.linear(x, w)
    return F.linear(x, w) + y


def halves(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    one, two = x.chunk(2)
    for _ in range(2):
        one, two = two.exp(), one.exp()
    return torch.cat([one, two]) @ w


def in_bodies(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    x = checkpoint(lambda x, w: torch.relu(x @ w), x @ w, w, use_reentrant=False)
    return checkpoint(lambda x, w: torch.tanh(x @ w), x, w, use_reentrant=False)


def written(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y, z = x @ w, x @ w
    z.add_(1)
    return y + z


@pytest.mark.parametrize(
    ("program", "calls", "read"),
    [(layers, 5, 1), (halves, 6, 2)],
)
def test_the_first_of_calls_that_are_alike_is_left(program: Callable[..., torch.Tensor], calls: int, read: int) -> None:
    x, w = torch.randn(8, 8), torch.randn(8, 8, requires_grad=True)
    gm = dynamo_graph(program, x, w)
    found = without_repeats(gm)
    assert found is not None
    left, read_from = found
    count = [node.op for node in left.graph.nodes].count
    assert (count("call_function") + count("call_method"), len(read_from)) == (calls, read)
    inputs = (x, w) if gm.graph.find_nodes(op="placeholder")[0].meta["example_value"].requires_grad is False else (w, x)
    values = values_of(gm, read_from, inputs)
    own = {node.name: value for node, value in zip(read_from, values, strict=True)}
    names = [node.name for node in left.graph.find_nodes(op="output")[0].all_input_nodes]
    expected = values_of(gm, [node for node in gm.graph.nodes if node.name in names], inputs)
    known = dict(zip([node.name for node in gm.graph.nodes if node.name in names], expected, strict=True))
    for name, value in zip(names, left(*inputs, *own.values()), strict=True):
        assert torch.equal(value, known[name])


@pytest.mark.parametrize("program", [wider, squared, under_autocast, in_bodies, written])
def test_calls_that_are_not_alike_are_left(program: Callable[..., torch.Tensor]) -> None:
    """Of other dtypes, with a tensor twice, under autocast, taken of other bodies, or written to later."""
    x, w = torch.randn(8, 8), torch.randn(8, 8, requires_grad=True)
    assert without_repeats(dynamo_graph(program, x, w)) is None
