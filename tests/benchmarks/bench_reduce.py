"""How long reducing, the repro and the search for a workaround take on a piece of a model with real sizes.

    python tests/benchmarks/bench_reduce.py [--layers N] [--seconds N]

The piece is a feed-forward block as BERT has it, with Inductor's own planted relu bug in the place of its activation.
Goal: at most 5 calls, reduced and confirmed within 45 s on two cores.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, fx, nn

from checked_backend.diagnose.reduce import reduce
from checked_backend.diagnose.repro import write_repro
from checked_backend.diagnose.workaround.search import find_workaround
from checked_backend.findings import Kind
from checked_backend.options import CheckOptions
from checked_backend.regions.graph_case import GraphCase

aten = torch.ops.aten
BUG = {"cpp.inject_relu_bug_TESTING_ONLY": "accuracy"}
CALLS_GOAL, SECONDS_GOAL = 5, 45.0


def block(x: Tensor, up: Tensor, down: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Feed-forward, residual, layer norm, on ATen operators."""
    flat = aten.view.default(x, [512, 768])
    hidden = aten.relu.default(aten.mm.default(flat, up))
    out = aten.view.default(aten.mm.default(hidden, down), [4, 128, 768])
    return aten.native_layer_norm.default(aten.add.Tensor(out, x), [768], weight, bias, 1e-12)[0]


def piece(layers: int) -> GraphCase:
    """So many blocks, one after the other."""

    def program(x: Tensor, up: Tensor, down: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        first = x
        for _ in range(layers):
            x = block(x, up, down, weight, bias)
        return aten.sum.default(first), x

    torch.manual_seed(0)
    inputs = (
        torch.randn(4, 128, 768),
        torch.randn(768, 3072) / 28,
        torch.randn(3072, 768) / 55,
        torch.ones(768),
        torch.zeros(768),
    )
    graph = fx.GraphModule(nn.Module(), fx.symbolic_trace(program).graph)
    return GraphCase(graph, inputs, CheckOptions(compiler="inductor", compiler_options=BUG))


def cpu_seconds() -> float:
    """What this process and those it waited for have used: on a machine that others use too, the fairer number."""
    own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=90.0, help="time limit of the reduction")
    chosen = parser.parse_args()
    table = Table(title=f"reducing {chosen.layers} block(s) of [4, 128, 768]")
    for column in ("step", "seconds", "CPU seconds", "result"):
        table.add_column(column)
    case = piece(chosen.layers)
    began, used = time.monotonic(), cpu_seconds()
    reduction = reduce(case, subject="output[1]", kind=Kind.LOGIC, deadline=began + chosen.seconds)
    reduced = time.monotonic() - began
    result = f"{reduction.size}; {reduction.tried} tried, {reduction.stopped}"
    table.add_row("reduce", f"{reduced:.1f}", f"{cpu_seconds() - used:.1f}", result)
    with tempfile.TemporaryDirectory() as folder:
        began, used = time.monotonic(), cpu_seconds()
        repro = write_repro(reduction.case, Path(folder), name="bench", subject=reduction.subject, kind=Kind.LOGIC)
        wrote = time.monotonic() - began
        lines = len(repro.path.read_text().splitlines())
    result = f"{'confirmed' if repro.confirmed else 'NOT CONFIRMED'}, {lines} lines"
    table.add_row("repro", f"{wrote:.1f}", f"{cpu_seconds() - used:.1f}", result)
    began, used = time.monotonic(), cpu_seconds()
    workaround = find_workaround(reduction.case, deadline=began + chosen.seconds)
    result = "none" if workaround is None else workaround.name
    table.add_row("workaround", f"{time.monotonic() - began:.1f}", f"{cpu_seconds() - used:.1f}", result)
    console = Console(width=140)
    console.print(table)
    good = reduction.size.calls <= CALLS_GOAL and repro.confirmed and reduced + wrote <= SECONDS_GOAL
    console.print(f"goal: {CALLS_GOAL} calls, confirmed, {SECONDS_GOAL:.0f} s: {'met' if good else 'NOT met'}")


if __name__ == "__main__":
    main()
