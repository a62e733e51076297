"""Programs of several ranks in which one has a fault, for `tests.support.ranks.run_ranks`."""

from __future__ import annotations

import time

import torch
from torch import nn

from tests.support.rank_programs import Block, faulty, step


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
