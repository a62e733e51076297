"""Which graphs exchange tensors with other ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import fx

from checked_backend.ranks.collectives import collective_lines, communicates


def traced(function: Callable[..., Any]) -> fx.GraphModule:
    graphs: list[fx.GraphModule] = []

    def keep(gm: fx.GraphModule, _inputs: Any) -> Callable[..., Any]:
        graphs.append(gm)
        return gm.forward

    torch._dynamo.reset()
    torch.compile(function, backend=keep)(torch.ones(4))
    return graphs[0]


@pytest.fixture
def _group() -> Any:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_graph_without_collectives_exchanges_nothing() -> None:
    assert not communicates(traced(lambda x: x.relu() + 1))


@pytest.mark.usefixtures("_group")
def test_collectives_are_found_with_their_lines() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        y = functional.all_reduce(x, "sum", dist.group.WORLD)
        z = x * 2
        dist.all_reduce(z)
        return y + z

    gm = traced(program)
    assert communicates(gm)
    lines = collective_lines(gm)["all_reduce"]
    assert len(lines) == 2
    assert "functional.all_reduce(x" in lines[0]
    assert "dist.all_reduce(z)" in lines[1]


@pytest.mark.usefixtures("_group")
def test_collectives_in_a_body_are_found() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(
            lambda y: functional.all_reduce(y, "sum", dist.group.WORLD) * 2, x, use_reentrant=False
        )

    assert communicates(traced(program))
