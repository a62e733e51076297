"""What a rechecked call costs beside a steady checked one, for growing models.

    OMP_NUM_THREADS=1 python tests/benchmarks/bench_recheck.py [--millions 2 10 40] [--autocast]

Four linear layers with GELU, forward and backward, float32 or under autocast to bfloat16, Inductor, new data in each
call. Call 1 is compared with noise, calls 2, 4, 8 and 16 with the scales that it found, and the others with four times
as much. Times are of one run: the ratio of the 2nd and the 16th call to the median of the calls around the latter. Peak
memory (of Linux alone) is the process's less what it takes before the first call, in units of the weights: of the first
call, of the rechecks, and of the others.
"""

from __future__ import annotations

import argparse
import math
import re
import statistics
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

import checked_backend as cb

RECHECKED = 16
RECHECKS = (2, 4, 8, RECHECKED)


def peak() -> float:
    """The process's peak memory since this was asked last, in bytes."""
    [kilobytes] = re.findall(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text())
    Path("/proc/self/clear_refs").write_text("5")
    return 1024 * float(kilobytes)


def measured(millions: float, *, autocast: bool) -> tuple[list[float], list[float]]:
    """The seconds and the peak memory of each training step of a fresh model with so many million parameters."""
    torch.compiler.reset()
    width = round(math.sqrt(millions * 1e6 / 4))
    layers = [layer for _ in range(4) for layer in (torch.nn.Linear(width, width), torch.nn.GELU())]
    model = torch.nn.Sequential(*layers)
    compiled = torch.compile(model, backend="numcheck", options={"localize": False})
    seconds, peaks = [], []
    peak()
    before = peak()
    with cb.collect(closing=False):
        for _ in range(RECHECKED + 1):
            model.zero_grad()
            x = torch.randn(64, width)
            began = time.perf_counter()
            with torch.autocast("cpu", enabled=autocast):
                y = compiled(x)
            y.float().sum().backward()
            seconds.append(time.perf_counter() - began)
            peaks.append((peak() - before) / (millions * 4e6))
    return seconds, peaks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--millions", type=float, nargs="+", default=[2, 10, 40])
    parser.add_argument("--autocast", action="store_true")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    compared = "call 2 / steady", f"call {RECHECKED} / steady"
    memory = "memory of call 1", "of rechecks", "of others"
    table = Table("parameters, millions", "call 1, s", "steady, s", *compared, *memory)
    for millions in sorted(asked.millions):
        seconds, peaks = measured(millions, autocast=asked.autocast)
        steady = statistics.median([*seconds[8 : RECHECKED - 1], seconds[RECHECKED]])
        rechecks = max(peaks[call - 1] for call in RECHECKS)
        others = max(one for call, one in enumerate(peaks, 1) if call not in (1, *RECHECKS))
        ratios = seconds[1] / steady, seconds[RECHECKED - 1] / steady
        cells = seconds[0], steady, *ratios, peaks[0], rechecks, others
        table.add_row(f"{millions:g}", *(f"{cell:.2f}" for cell in cells))
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
