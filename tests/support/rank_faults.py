"""Programs of several ranks in which one has a fault, for `tests.support.ranks.run_ranks`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import fx, nn
from torch.utils.checkpoint import checkpoint

import checked_backend as cb
from tests.support import faults
from tests.support.rank_programs import Block, faulty, step, told
from tests.support.spoiling import raising


def data_parallel(rank: int, world: int, *, on: int) -> None:
    """Train with DDP, whose collectives are outside of every region; on one rank, which comes late, it is wrong."""
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(Block())
    compiler = faulty("aten.gelu.default") if rank == on else "aot_eager"
    options = {"compiler": compiler, "localize": False}
    compiled = torch.compile(model, backend="numcheck", options=options)
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
    rank: int, world: int, *, fault: str = "", on: int | None = None, receives: bool = False, times: int = 2
) -> dict[str, Any]:
    """Rank 0 sends the same in its exchanges, rank 1 does not; the compiler turns the order of two round, or is wrong.

    Args:
        rank: The rank.
        world: The number of ranks.
        fault: The fault; "" for another order.
        on: The rank that has it; None for all.
        receives: Whether rank 0 only receives what rank 1 sends.
        times: The number of exchanges.
    """

    def exchanged(x: torch.Tensor) -> torch.Tensor:
        if receives:
            return functional.broadcast(x.sin(), 1, dist.group.WORLD)
        return functional.all_reduce(x.sin(), "sum", dist.group.WORLD)

    def program(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        total = exchanged(x)
        for number in range(1, times):
            total = total - 3 * exchanged(y * number if number > 1 else y)
        return torch.tanh(total)

    compiler = faulty(fault) if fault else reordered
    options = {
        "compiler": compiler if on in (rank, None) else "eager",
        "on_divergence": "record",
        "localize": False,
    }
    x = torch.full((4,), 0.5)
    with cb.collect() as session, torch.no_grad():
        torch.compile(program, backend="numcheck", options=options)(x * rank, x * rank * 2)
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


class GatheringAgain(nn.Module):
    """Its backward pass makes an exchange of the forward pass a second time, and no other."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def body(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        with torch.no_grad():
            everyone = functional.all_gather_tensor(y.detach().tanh(), 0, dist.group.WORLD).sum(0)
        return (y * everyone).sigmoid()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.body, x, use_reentrant=False).tanh()


def crashing(
    rank: int,
    world: int,
    *,
    at: str,
    on: int | None,
    on_divergence: str = "fallback",
    again: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Train where the compiled backward pass raises at an operator. Are the weights those of eager?"""
    weights = []
    given = {"compiler": "aot_eager", "on_divergence": on_divergence, "localize": False, **options}
    if on in (rank, None):
        given["compiler"] = faults.wrong_operator(f"aten.{at}.default", raising("a kernel is missing"), "aot")
    with cb.collect() as session:
        for backend, chosen in (("eager", None), ("numcheck", given)):
            torch.manual_seed(rank)
            model = GatheringAgain() if again else ExchangingTwice()
            compiled = torch.compile(model, backend=backend, options=chosen)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for number in range(3):
                optimizer.zero_grad()
                step(compiled, number * world + rank)
                optimizer.step()
            weights.append([parameter.detach() for parameter in model.parameters()])
    return {**told(session.report), "equal": all(map(torch.equal, *weights))}
