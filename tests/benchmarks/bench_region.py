"""What a checked step costs: time, memory, and the calls that are not checked.

    python tests/benchmarks/bench_region.py [--threads N] [--steps N] [--device cuda]

Prints ratios taken in one run: the variants of a model take turns, and the fastest step of each counts. Peak memory
is that of one warm step above what the process held before it, each variant in a process of its own. Calls 1, 2, 4,
8, ... of a region are rechecked, with a run in float64, and need more: theirs is in a column of its own.
On a GPU the memory is the device's, the whole of it, and the times that a step waits for the device are counted.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from tiny_region import seconds_per_call
from torch import nn
from transformers import BertConfig, BertForMaskedLM

from checked_backend import numcheck

Step = Callable[[], None]

VARIANTS = ("eager", "compiled", "checked")

STEADY = 5
"""A step in which a checked region is held against the noise that it knows."""

RECHECKED = 4
"""A step in which a checked region is rechecked."""


class ResidualNet(nn.Module):
    """A small ResNet with batch norm."""

    def __init__(self, channels: int = 32) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU())
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(channels, channels, 3, padding=1),
                nn.BatchNorm2d(channels),
                nn.ReLU(),
                nn.Conv2d(channels, channels, 3, padding=1),
                nn.BatchNorm2d(channels),
            )
            for _ in range(4)
        )
        self.head = nn.Linear(channels, 10)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.stem(images)
        for block in self.blocks:
            x = torch.relu(x + block(x))
        return nn.functional.cross_entropy(self.head(x.mean((2, 3))), labels)


class Bert(nn.Module):
    """Four layers of BERT with its masked language model loss."""

    def __init__(self) -> None:
        super().__init__()
        config = BertConfig(
            vocab_size=4000, hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=1024
        )
        self.bert = BertForMaskedLM(config)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.bert(input_ids=ids, labels=labels).loss
        return loss


def workload(name: str, device: str) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    torch.manual_seed(0)
    if name == "bert":
        ids = torch.randint(0, 4000, (8, 128), device=device)
        return Bert().to(device), (ids, ids)
    images, labels = torch.randn(32, 3, 32, 32), torch.randint(0, 10, (32,))
    return ResidualNet().to(device), (images.to(device), labels.to(device))


def prepared(variant: str, model: nn.Module) -> Callable[..., torch.Tensor]:
    if variant == "eager":
        return model
    if variant == "compiled":
        return torch.compile(model, backend="inductor", options={"fallback_random": True})  # type: ignore[return-value]
    return torch.compile(model, backend=numcheck)  # type: ignore[return-value]


def train_step(variant: str, name: str, device: str) -> Step:
    """A function that runs one forward and backward pass."""
    model, inputs = workload(name, device)
    run = prepared(variant, copy.deepcopy(model))
    parameters = list(run.parameters())  # type: ignore[attr-defined]

    def step() -> None:
        for parameter in parameters:
            parameter.grad = None
        run(*inputs).backward()
        if device == "cuda":
            torch.cuda.synchronize()

    return step


def seconds(step: Step) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def waits(name: str) -> dict[str, Counter[str]]:
    """Where one warm step of each variant waits for the GPU, and how often."""
    found = {}
    for variant in VARIANTS:
        step = train_step(variant, name, "cuda")
        for _ in range(STEADY - 1):
            step()
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            step()
            torch.cuda.set_sync_debug_mode("default")
        places = (f"{Path(one.filename).name}:{one.lineno}" for one in told if "synchroniz" in str(one.message))
        found[variant] = Counter(places)
    return found


def step_times(name: str, steps: int, device: str) -> dict[str, float]:
    """The fastest step of each variant, taken in turns."""
    runs = {variant: train_step(variant, name, device) for variant in VARIANTS}
    for step in runs.values():
        step()
        step()
    best = dict.fromkeys(VARIANTS, float("inf"))
    for _ in range(steps):
        for variant, step in runs.items():
            best[variant] = min(best[variant], seconds(step))
    return best


def resident(field: str) -> int:
    """A line of the process's memory status, in bytes (Linux)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def peak_of_one_step(variant: str, name: str, number: int, device: str) -> int:
    """Peak memory of a warm step, counted from 1, above what was held before it, in bytes."""
    step = train_step(variant, name, device)
    for _ in range(number - 1):
        step()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        step()
        return torch.cuda.max_memory_allocated()
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    step()
    return resident("VmHWM") - before


def peaks(name: str, threads: int, device: str) -> dict[str, int]:
    """`peak_of_one_step` of each variant, and of a step that is rechecked, in processes of their own."""
    found = {}
    for label, variant, number in (
        *((variant, variant, STEADY) for variant in VARIANTS),
        ("recheck", "checked", RECHECKED),
    ):
        command = [sys.executable, __file__, "--threads", str(threads), "--device", device]
        command += ["--peak-of", variant, name, str(number)]
        # large blocks go back to the system as soon as they are freed, so that the peak is that of live tensors
        environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
        done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
        found[label] = int(json.loads(done.stdout.splitlines()[-1]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--peak-of", nargs=3, metavar=("VARIANT", "MODEL", "STEP"), help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    if chosen.peak_of:
        variant, name, number = chosen.peak_of
        print(json.dumps(peak_of_one_step(variant, name, int(number), chosen.device)))
        return
    table = Table(title=f"a checked training step on {chosen.device}, {chosen.threads} thread(s)")
    for column in (
        "model",
        "eager ms",
        "compiled ms",
        "checked ms",
        "time ratio",
        "eager MB",
        "compiled MB",
        "checked MB",
        "memory ratio",
        "recheck MB",
    ):
        table.add_column(column, justify="right")
    for name in ("bert", "resnet"):
        times = step_times(name, chosen.steps, chosen.device)
        memory = peaks(name, chosen.threads, chosen.device)
        table.add_row(
            name,
            *(f"{times[variant] * 1e3:.1f}" for variant in VARIANTS),
            f"{times['checked'] / (times['eager'] + times['compiled']):.3f}",
            *(f"{memory[variant] / 2**20:.0f}" for variant in VARIANTS),
            f"{memory['checked'] / (memory['eager'] + memory['compiled']):.3f}",
            f"{memory['recheck'] / 2**20:.0f}",
        )
    bare, passed_by = seconds_per_call(2000, every=10**9)
    console = Console(width=160)
    console.print(table)
    for name in ("bert", "resnet") if chosen.device == "cuda" else ():
        for variant, places in waits(name).items():
            most = ", ".join(f"{place} {count}" for place, count in places.most_common(12))
            console.print(f"{name}, {variant}: waits for the GPU {places.total()} times: {most}")
    console.print("goals: time ratio 1.10, memory ratio 1.05, both of checked over (eager + compiled)")
    console.print(
        f"a call that is not checked: {bare * 1e6:.1f} us bare, {passed_by * 1e6:.1f} us through numcheck, "
        f"{(passed_by - bare) * 1e6:+.1f} us (goal: under 20)"
    )


if __name__ == "__main__":
    main()
