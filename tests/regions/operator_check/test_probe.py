"""A region's graph before it is probed: writes in place are spelled otherwise, and repeated calls are left out."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import checked_backend as cb
from checked_backend.regions.operator_check.probe import values_of, without_repeats
from tests.support import faults
from tests.support.region_tools import agreed, checked, dynamo_graph, gathered

Tensor = torch.Tensor


def _slice(h: Tensor) -> Tensor:
    h[:, 0] = 1.0
    return h


def _added(h: Tensor) -> Tensor:
    h += 1
    h.mul_(2)
    return h


def _accumulated(h: Tensor) -> Tensor:
    total = torch.zeros(h.shape, dtype=h.dtype)
    total.add_(h)
    return total


def _seen_by_view(h: Tensor) -> Tensor:
    view = h.view(-1)
    h.mul_(2)
    return view.view(h.shape)


def _without_history(h: Tensor) -> Tensor:
    with torch.no_grad():
        h.mul_(2)
    return h


CHECKED: dict[str, Callable[[Tensor], Tensor]] = {
    "method": lambda h: h.relu_(),
    "named": lambda h: F.relu(h, inplace=True),
    "by position": lambda h: F.leaky_relu(h, 0.1, True),
    "dropout": torch.nn.Dropout(0.1, inplace=True),
    "twice": _added,
    "accumulated": _accumulated,
}
TOLD: dict[str, Callable[[Tensor], Tensor]] = {
    "slice": _slice,
    "seen by a view": _seen_by_view,
    "under no_grad": _without_history,
}


class Model(torch.nn.Module):
    """Two layers with a write in place between them."""

    def __init__(self, write: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(16, 32)
        self.second = torch.nn.Linear(32, 16)
        self.write = write

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.gelu(self.write(self.first(x)))).float().square().mean()


def report(write: Callable[[Tensor], Tensor], factor: float) -> cb.Report:
    """Of one training step whose first weight has a gradient that is wrong by a factor at 16 bits."""

    def scaled(tensor: Tensor) -> Tensor:
        return tensor * factor if tensor.dtype is torch.bfloat16 else tensor

    run = checked(Model(write).bfloat16(), faults.spoiled_gradient("first.weight", scaled, "aot"))
    return gathered(lambda: run(torch.randn(40, 16, dtype=torch.bfloat16)).backward())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", CHECKED)
def test_gradients_that_pass_writes_in_place_are_checked(name: str) -> None:
    clean = report(CHECKED[name], 1.0)
    assert agreed(clean)
    assert not clean.coverage.skipped
    assert report(CHECKED[name], 1.03).verdict is cb.Verdict.FAIL


@pytest.mark.parametrize("name", TOLD)
def test_where_they_cannot_be_checked_the_coverage_says_so(name: str) -> None:
    clean = report(TOLD[name], 1.0)
    assert agreed(clean)
    [skip] = clean.coverage.skipped
    assert skip.subject == "operators by themselves"
    assert "gradients that pass" in skip.reason
    assert "written to later" in skip.reason


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
