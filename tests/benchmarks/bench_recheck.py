"""What a rechecked call costs beside a steady checked one, for growing models.

    OMP_NUM_THREADS=1 python tests/benchmarks/bench_recheck.py [--millions 2 10 40]

Four linear layers with GELU, forward and backward, float32, Inductor. Calls 1 and 2 are compared with noise, calls 4, 8
and 16 with the scales that these found, and the others with four times as much. Times are of one run: the ratio of the
16th call to the median of the calls around it. Peak memory is the process's, in units of the weights.
"""

from __future__ import annotations

import argparse
import math
import resource
import statistics
import time

import torch
from rich.console import Console
from rich.table import Table

import checked_backend as cb

RECHECKED = 16


def seconds_of_calls(millions: float) -> list[float]:
    """The seconds of each training step of a fresh model with so many million parameters."""
    torch.compiler.reset()
    width = round(math.sqrt(millions * 1e6 / 4))
    layers = [layer for _ in range(4) for layer in (torch.nn.Linear(width, width), torch.nn.GELU())]
    model, x = torch.nn.Sequential(*layers), torch.randn(64, width)
    compiled = torch.compile(model, backend="numcheck", options={"localize": False})
    seconds = []
    with cb.collect(closing=False):
        for _ in range(RECHECKED + 1):
            model.zero_grad()
            began = time.perf_counter()
            compiled(x).sum().backward()
            seconds.append(time.perf_counter() - began)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--millions", type=float, nargs="+", default=[2, 10, 40])
    sizes = sorted(parser.parse_args().millions)
    torch.set_num_threads(1)
    table = Table("parameters, millions", "first, s", "rechecked, s", "steady, s", "rechecked / steady", "peak memory")
    for millions in sizes:
        seconds = seconds_of_calls(millions)
        steady = statistics.median([*seconds[8 : RECHECKED - 1], seconds[RECHECKED]])
        rechecked = seconds[RECHECKED - 1]
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / (millions * 4e6)
        cells = seconds[0], rechecked, steady, rechecked / steady, peak
        table.add_row(f"{millions:g}", *(f"{cell:.2f}" for cell in cells))
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
