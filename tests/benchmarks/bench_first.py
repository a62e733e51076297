"""What the first steps of a script cost, with empty caches and when the script is run again.

    OMP_NUM_THREADS=1 python tests/benchmarks/bench_first.py [--models encoder llama] [--growth SIZE]

A training step in bfloat16, whose kernels are checked by themselves, beside the same step under Inductor alone. Each
script runs in a process of its own, twice, with caches of its own. Seconds are of CPU with all children, which other
programs do not change.

With ``--growth`` the first step alone, in float32: how it grows with the number of regions, with the operators of one,
with parameters, up to that size. A line ends with the exponent of what the check adds: 1 is linear.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

import torch
import torch._inductor.compile_fx  # a step is not charged with importing it, which Inductor's backend does before
from rich.console import Console
from rich.table import Table
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

STEPS = 17
RECHECKED = (2, 4, 8, 16)

SIZES: dict[str, Sequence[int]] = {"regions": (1, 5, 20), "operators": (100, 1000, 3000), "million": (10, 100, 400)}

OPTIONS = {"inductor": {"fallback_random": True}, "numcheck": {"localize": False}}


def encoder(backend: str, layers: int = 4) -> Callable[[], torch.Tensor]:
    """Encoder layers of 256 features under autocast."""
    layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
    model = torch.compile(nn.TransformerEncoder(layer, layers), backend=backend, options=OPTIONS[backend])
    x = torch.randn(4, 64, 256)

    def loss() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            found: torch.Tensor = model(x).float().square().mean()
            return found

    return loss


def llama(backend: str) -> Callable[[], torch.Tensor]:
    """Two layers of a Llama of 384 features, whose weights are bfloat16."""
    config = LlamaConfig(
        vocab_size=1000, hidden_size=384, intermediate_size=1024, num_hidden_layers=2, num_attention_heads=6
    )
    model = torch.compile(LlamaForCausalLM(config).bfloat16(), backend=backend, options=OPTIONS[backend])
    words = torch.randint(0, 1000, (4, 64))
    return lambda: model(input_ids=words, labels=words).loss


MODELS = {"encoder": encoder, "deep": partial(encoder, layers=12), "llama": llama}


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


def grown(kind: str, count: int, backend: str) -> Callable[[], torch.Tensor]:
    torch._dynamo.config.recompile_limit = 64  # the blocks share their code
    model = KINDS[kind](count, lambda one: torch.compile(one, backend=backend, options=OPTIONS[backend]))  # type: ignore[return-value]
    x = torch.randn(32, next(iter(model.parameters())).shape[-1])
    return lambda: model(x).square().mean()


def cpu_seconds() -> float:
    """CPU time of this process and of its children that have ended."""
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


def run_script(name: str, backend: str) -> None:
    """Print the CPU seconds of each step."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    kind, _, count = name.partition(":")
    loss = grown(kind, int(count), backend) if count else MODELS[name](backend)
    times = []
    for _ in range(1 if count else STEPS):
        began = cpu_seconds()
        loss().backward()
        times.append(cpu_seconds() - began)
    print(json.dumps(times))


def times_of(name: str, backend: str, folder: str) -> list[float]:
    """The CPU seconds of each step, in a process whose caches are in a folder."""
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": folder, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    command = [sys.executable, __file__, "--script", name, backend]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    found: list[float] = json.loads(done.stdout.splitlines()[-1])
    return found


def show_growth(most: int) -> None:
    for kind, sizes in SIZES.items():
        table = Table("number of", "", "Inductor, s", "numcheck, s", "ratio", "exponent of what is added")
        before: tuple[int, float] | None = None
        for count in (size for size in sizes if size <= most):
            with tempfile.TemporaryDirectory() as compiled, tempfile.TemporaryDirectory() as checked:
                [bare] = times_of(f"{kind}:{count}", "inductor", compiled)
                [own] = times_of(f"{kind}:{count}", "numcheck", checked)
            added = max(own - bare, 1e-3)
            growth = "" if before is None else f"{math.log(added / before[1]) / math.log(count / before[0]):.2f}"
            table.add_row(kind, str(count), f"{bare:.1f}", f"{own:.1f}", f"{own / bare:.2f}", growth)
            before = count, added
        Console(width=110).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=MODELS)
    parser.add_argument("--growth", type=int, metavar="SIZE", help="the growth of the first step, up to a size")
    parser.add_argument("--script", nargs=2, metavar=("MODEL", "BACKEND"), help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.script:
        run_script(*chosen.script)
        return
    if chosen.growth:
        show_growth(chosen.growth)
        return
    rechecks = [f"call {call} / steady" for call in RECHECKED]
    table = Table("model", "caches", "Inductor, s", "numcheck, s", "ratio", *rechecks, "steady / Inductor's")
    for name in chosen.models:
        with tempfile.TemporaryDirectory() as compiled, tempfile.TemporaryDirectory() as checked:
            for caches in ("empty", "warm"):
                bare, own = times_of(name, "inductor", compiled), times_of(name, "numcheck", checked)
                steady = statistics.median(own[call - 1] for call in range(5, STEPS + 1) if call not in RECHECKED)
                cells = bare[0], own[0], own[0] / bare[0], *(own[call - 1] / steady for call in RECHECKED)
                table.add_row(name, caches, *(f"{cell:.2f}" for cell in (*cells, steady / statistics.median(bare[4:]))))
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
