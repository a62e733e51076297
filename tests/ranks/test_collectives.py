"""Which graphs exchange tensors with other ranks, and graphs that are cut there."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from checked_backend.ranks.collectives import (
    CutGraph,
    collective_lines,
    communicates,
    cut_collectives,
    with_sent_aliases,
)
from checked_backend.regions.compile import copy_graph
from tests.support.region_tools import dynamo_graph

pytestmark = pytest.mark.usefixtures("one_rank")


def test_a_graph_without_collectives_exchanges_nothing() -> None:
    assert not communicates(dynamo_graph(lambda x: x.relu() + 1, torch.ones(4)))


def test_collectives_are_found_with_their_lines() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        y = functional.all_reduce(x, "sum", dist.group.WORLD)
        z = x * 2
        dist.all_reduce(z)
        return y + z

    gm = dynamo_graph(program, torch.ones(4))
    assert communicates(gm)
    lines = collective_lines(gm)["all_reduce"]
    assert len(lines) == 2
    assert "functional.all_reduce(x" in lines[0]
    assert "dist.all_reduce(z)" in lines[1]


def test_collectives_in_a_body_are_found() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(
            lambda y: functional.all_reduce(y, "sum", dist.group.WORLD) * 2, x, use_reentrant=False
        )

    assert communicates(dynamo_graph(program, torch.ones(4)))


def cut(gm: torch.fx.GraphModule) -> CutGraph:
    made = cut_collectives(copy_graph(gm))
    assert isinstance(made, CutGraph), made
    return made


def several(x: torch.Tensor) -> torch.Tensor:
    group = dist.group.WORLD
    first = functional.all_reduce(x * 2, "sum", group)
    one, other = functional.all_reduce_coalesced([first + 1, x - 1], "max", group)
    total = one * other
    dist.all_reduce(total)
    return functional.all_gather_tensor(total.add_(1), 0, group)


def test_what_is_sent_and_received_are_results_and_inputs_in_the_order_of_eager() -> None:
    x = torch.randn(4)
    made = cut(dynamo_graph(several, x))
    assert not communicates(made.graph)
    assert made.names == ("all_reduce_0", "all_reduce_1", "all_reduce_2", "all_reduce_3", "all_gather_0")
    received = [torch.full((4,), float(number)) for number in range(5)]
    result, *sent = made.graph(x, *[value.clone() for value in received])
    assert torch.equal(result, received[4])
    assert all(map(torch.equal, sent, [x * 2, received[0] + 1, x - 1, received[1] * received[2], received[3] + 1]))


def test_what_is_sent_is_what_it_was_then() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        total = functional.all_reduce(y, "sum", dist.group.WORLD)
        y.add_(1)
        return y + total

    x = torch.ones(3)
    _, sent = cut(dynamo_graph(program, x)).graph(x, torch.zeros(3))
    assert torch.equal(sent, x * 2)


def test_gradients_through_other_ranks_alone_reach_the_aliases() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        return y + 3 * functional.all_reduce(y, "sum", dist.group.WORLD)

    x = torch.ones(3, requires_grad=True)
    result, alias = with_sent_aliases(copy_graph(dynamo_graph(program, x)))(x)
    [gradient] = torch.autograd.grad([result], [alias], [torch.ones(3)])
    assert torch.equal(gradient, torch.full((3,), 3.0))


def test_graphs_that_cannot_be_cut_say_why() -> None:
    def body(y: torch.Tensor) -> torch.Tensor:
        return functional.all_reduce(y, "sum", dist.group.WORLD) * 2

    def checkpointed(x: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(body, x, use_reentrant=False)

    shard = distribute_tensor(torch.ones(4), init_device_mesh("cpu", (1,)), [Shard(0)])
    reasons = [
        cut_collectives(dynamo_graph(checkpointed, torch.ones(4, requires_grad=True))),
        cut_collectives(dynamo_graph(lambda x: x.sin(), shard)),
    ]
    assert "in the body of another operator" in str(reasons[0])
    assert "distributed tensors" in str(reasons[1])
