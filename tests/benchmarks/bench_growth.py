"""How the first checked step grows: with the number of regions, with the operators of one, with parameters.

    OMP_NUM_THREADS=1 python tests/benchmarks/bench_growth.py [--most 1000]

Training steps in float32 with empty caches, each in a process of its own, in CPU seconds with all children: of
Inductor alone, and what the check adds. A line ends with the exponent of that growth: 1 is linear.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from bench_first import OPTIONS, cpu_seconds
from rich.console import Console
from rich.table import Table
from torch import nn

SIZES: dict[str, Sequence[int]] = {"regions": (1, 5, 20), "operators": (100, 1000, 3000), "million": (10, 100, 400)}


def regions(count: int, compiled: Callable[[nn.Module], nn.Module]) -> nn.Module:
    """Blocks of different sizes, each compiled by itself."""
    widths = [64 + 8 * number for number in range(count + 1)]
    blocks = (nn.Sequential(nn.Linear(a, b), nn.GELU(), nn.LayerNorm(b)) for a, b in pairwise(widths))
    return nn.Sequential(*map(compiled, blocks))


class Chain(nn.Module):
    """So many operators, one after the other, of four kinds."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count
        self.weight = nn.Parameter(torch.eye(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in range(0, self.count, 4):
            x = torch.tanh(x * 1.01 + number / self.count) if number % 40 else torch.sin((x @ self.weight) * 0.5)
        return x


def operators(count: int, compiled: Callable[[nn.Module], nn.Module]) -> nn.Module:
    """One region of so many operators."""
    return compiled(Chain(count))


def million(count: int, compiled: Callable[[nn.Module], nn.Module]) -> nn.Module:
    """One region of so many million parameters."""
    width = round(math.sqrt(count * 1e6 / 4))
    return compiled(nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(width, width), nn.GELU()))))


KINDS = {"regions": regions, "operators": operators, "million": million}


def run_step(kind: str, count: int, backend: str) -> None:
    """Print the CPU seconds of the first step."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    torch._dynamo.config.recompile_limit = 64  # the blocks share their code
    model = KINDS[kind](count, lambda one: torch.compile(one, backend=backend, options=OPTIONS[backend]))  # type: ignore[return-value]
    x = torch.randn(32, next(iter(model.parameters())).shape[-1])
    began = cpu_seconds()
    model(x).square().mean().backward()
    print(json.dumps(cpu_seconds() - began))


def seconds_of(kind: str, count: int, backend: str) -> float:
    """The CPU seconds of the first step of a new process with empty caches."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": folder, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        command = [sys.executable, __file__, "--step", kind, str(count), backend]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    return float(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kinds", nargs="*", default=list(KINDS), choices=KINDS)
    parser.add_argument("--most", type=int, default=10_000, help="leave out sizes above this")
    parser.add_argument("--step", nargs=3, metavar=("KIND", "COUNT", "BACKEND"), help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.step:
        kind, count, backend = chosen.step
        run_step(kind, int(count), backend)
        return
    for kind in chosen.kinds:
        table = Table("number of", "", "Inductor, s", "numcheck, s", "ratio", "exponent of what is added")
        before: tuple[int, float] | None = None
        for count in (size for size in SIZES[kind] if size <= chosen.most):
            bare, own = seconds_of(kind, count, "inductor"), seconds_of(kind, count, "numcheck")
            added = max(own - bare, 1e-3)
            growth = "" if before is None else f"{math.log(added / before[1]) / math.log(count / before[0]):.2f}"
            table.add_row(kind, str(count), f"{bare:.1f}", f"{own:.1f}", f"{own / bare:.2f}", growth)
            before = count, added
        Console(width=110).print(table)


if __name__ == "__main__":
    main()
