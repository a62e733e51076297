"""What the first steps of a script cost, with empty caches and when the script is run again.

    OMP_NUM_THREADS=1 python tests/benchmarks/bench_first.py [--models encoder llama]

A training step in bfloat16, whose kernels are checked by themselves, beside the same step under Inductor alone. Each
script runs in a process of its own, twice, with caches of its own. Seconds are of CPU with all children, which other
programs do not change.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial

import torch
import torch._inductor.compile_fx  # a step is not charged with importing it, which Inductor's backend does before
from rich.console import Console
from rich.table import Table
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

STEPS = 17
RECHECKED = (2, 4, 8, 16)

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


def cpu_seconds() -> float:
    """CPU time of this process and of its children that have ended."""
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


def run_script(name: str, backend: str) -> None:
    """Print the CPU seconds of each step."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    loss = MODELS[name](backend)
    times = []
    for _ in range(STEPS):
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=MODELS)
    parser.add_argument("--script", nargs=2, metavar=("MODEL", "BACKEND"), help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.script:
        run_script(*chosen.script)
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
