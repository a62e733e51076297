"""Which graphs exchange tensors with other ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from checked_backend.ranks.collectives import collective_lines, communicates
from tests.support.region_tools import dynamo_graph


def test_a_graph_without_collectives_exchanges_nothing() -> None:
    assert not communicates(dynamo_graph(lambda x: x.relu() + 1, torch.ones(4)))


@pytest.mark.usefixtures("one_rank")
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


@pytest.mark.usefixtures("one_rank")
def test_collectives_in_a_body_are_found() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(
            lambda y: functional.all_reduce(y, "sum", dist.group.WORLD) * 2, x, use_reentrant=False
        )

    assert communicates(dynamo_graph(program, torch.ones(4)))
