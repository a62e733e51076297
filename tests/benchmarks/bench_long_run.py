"""A long checked run of a tiny model: do memory, file descriptors and step time stay flat?

    python tests/benchmarks/bench_long_run.py [--steps N] [--every N | --budget S] [--compiler NAME]

Prints, for ten parts of the run: resident memory, open file descriptors, live tensors, Python objects, and the median
time of a step, relative to the run's second part. In the first part, things are prepared for later use.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import checked_backend as cb

PARTS = 10


@dataclass(frozen=True, slots=True)
class Sample:
    """The state of the process after a part of the run.

    Attributes:
        steps: Steps so far.
        resident: Bytes of resident memory.
        descriptors: Open file descriptors.
        tensors: Live tensors.
        objects: Objects that Python's garbage collector knows.
        step: Seconds of a step: the median of the part.
    """

    steps: int
    resident: int
    descriptors: int
    tensors: int
    objects: int
    step: float


def training(**options: object) -> Callable[[], None]:
    """A checked training step of a tiny model with dropout."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 4))
    run = torch.compile(model, backend="numcheck", options={"on_divergence": "record", "localize": False, **options})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        run(torch.randn(8, 16)).square().mean().backward()
        optimizer.step()

    return step


def samples(steps: int, **options: object) -> Iterator[Sample]:
    """Run the steps, and look at the process ten times."""
    step = training(**options)
    for part in range(PARTS):
        times = []
        for _ in range(steps // PARTS):
            began = time.perf_counter()
            step()
            times.append(time.perf_counter() - began)
        gc.collect()
        objects = gc.get_objects()
        # by type: isinstance would ask lazy modules, which imports them
        tensors = sum(issubclass(type(one), torch.Tensor) for one in objects)
        count = len(objects)
        del objects
        yield Sample(
            (part + 1) * (steps // PARTS), _resident(), _descriptors(), tensors, count, statistics.median(times)
        )


def _resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--budget", type=float)
    parser.add_argument("--compiler", default="aot_eager")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    how = {"every": chosen.every} if chosen.budget is None else {"budget": chosen.budget}
    table = Table(title=f"{chosen.steps} steps, {how}, {chosen.compiler}")
    for column in ("steps", "resident MiB", "descriptors", "tensors", "objects", "step ms", "of part 2"):
        table.add_column(column, justify="right")
    known: list[Sample] = []
    with cb.collect() as session:
        for sample in samples(chosen.steps, compiler=chosen.compiler, **how):
            known.append(sample)
            first = known[min(1, len(known) - 1)].step
            table.add_row(
                str(sample.steps),
                f"{sample.resident / 2**20:.1f}",
                str(sample.descriptors),
                str(sample.tensors),
                str(sample.objects),
                f"{sample.step * 1e3:.2f}",
                f"{sample.step / first:.2f}",
            )
    console = Console(width=140)
    console.print(table)
    console.print(str(session.report))


if __name__ == "__main__":
    main()
