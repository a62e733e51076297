"""Programs of several ranks in which one has a fault, for `tests.support.ranks.run_ranks`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import fx, nn

import checked_backend as cb
from tests.support import faults
from tests.support.raising import raising
from tests.support.rank_programs import Block, faulty, step, told
from tests.support.region_tools import checked


def data_parallel(rank: int, world: int, *, on: int) -> None:
    """Train with DDP, whose collectives are outside of every region; on one rank, which comes late, it is wrong."""
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(Block())
    compiler = faulty("aten.gelu.default") if rank == on else "aot_eager"
    compiled = torch.compile(model, backend="numcheck", options={"compiler": compiler, "localize": False})
    if rank == on:
        time.sleep(5)
    for number in range(4):
        step(compiled, number * world + rank)


def reordered(gm: fx.GraphModule, _inputs: Sequence[Any]) -> Callable[..., Any]:
    """A compiler that issues the second of two independent collectives first."""
    first, second = (node for node in gm.graph.nodes if "all_reduce" in str(node.target))
    for node in (*second.all_input_nodes, second):
        if node.op != "placeholder":
            first.prepend(node)
    gm.graph.lint()
    gm.recompile()
    return gm.forward


def sending_the_same(
    rank: int, world: int, *, fault: str = "", on: int | None = None, receives: bool = False
) -> dict[str, Any]:
    """Rank 0 sends the same in its exchanges, or nothing where it ``receives``, and rank 1 does not.

    One rank, or all, have the fault; without one the compiler turns the order of two exchanges round.
    """

    def exchanged(x: torch.Tensor) -> torch.Tensor:
        if receives:
            return functional.broadcast(x.sin(), 1, dist.group.WORLD)
        return functional.all_reduce(x.sin(), "sum", dist.group.WORLD)

    def program(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.tanh(exchanged(x) - 3 * exchanged(y))

    compiler = faulty(fault) if fault else reordered
    x = torch.full((4,), 0.5)
    with cb.collect() as session, torch.no_grad():
        checked(program, compiler if on in (rank, None) else "eager")(x * rank, x * rank * 2)
    return told(session.report)


class ExchangingTwice(nn.Module):
    """Two exchanges in each pass. Each operator between them has a derivative of another name."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.second = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = functional.all_reduce(self.first(x).relu(), "sum", dist.group.WORLD)
        return functional.all_reduce(self.second(total.tanh()), "sum", dist.group.WORLD).sigmoid()


def crashing(rank: int, world: int, *, at: str, on: int) -> None:
    """Train where the compiled backward pass of one rank raises at an operator."""
    torch.manual_seed(rank)
    compiler = faults.wrong_operator(f"aten.{at}.default", raising(faults.PlantedError("a kernel is missing")), "aot")
    step(checked(ExchangingTwice(), compiler if rank == on else "aot_eager"), rank + world)
