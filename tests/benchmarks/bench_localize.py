"""How long it takes from a failed check to the operator, and to a script that shows it; PyTorch's minifier beside it.

    python tests/benchmarks/bench_localize.py [--layers 4] [--device cuda] [--minifier SECONDS]

A BERT whose relu Inductor compiles wrongly (its own ``inject_relu_bug_TESTING_ONLY``) is checked once; the seconds are
counted from the moment the check has failed: of the clock, and of CPU with all workers, which other programs do not
change.
"""

from __future__ import annotations

import argparse
import logging
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from functorch.compile import minifier
from torch import fx
from transformers import BertConfig, BertForSequenceClassification

from checked_backend import CheckedBackendError, Finding
from checked_backend._torch.caches import without_compile_caches
from checked_backend.diagnose import investigate
from checked_backend.diagnose.localize.stages import Capture, stages_of
from checked_backend.options import CheckOptions
from checked_backend.process.worker import run_in_worker
from checked_backend.regions import compile as candidate
from checked_backend.regions.build import build_region
from checked_backend.regions.failure import Failure
from checked_backend.regions.graph_case import rerun_failure

RELU_BUG = {
    "cpu": {"cpp.inject_relu_bug_TESTING_ONLY": "accuracy"},
    "cuda": {"triton.inject_relu_bug_TESTING_ONLY": "accuracy"},
}


class Clock:
    """CPU seconds and seconds since it was made, in this process and in its workers."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self._begun = self._now()

    def _now(self) -> tuple[float, float]:
        used, process = 0.0, os.getpid()
        while True:
            parent, *times = Path(f"/proc/{process}/stat").read_text("ascii").rpartition(")")[2].split()[1:]
            used += sum(map(int, times[9:13])) / os.sysconf("SC_CLK_TCK")  # children that have ended are in it
            if process == self._process:
                return used, time.perf_counter()
            process = int(parent)

    def mark(self, what: str) -> None:
        used, now = (after - before for after, before in zip(self._now(), self._begun, strict=True))
        print(f"  {used:7.1f} s CPU {now:7.1f} s  {what}", flush=True)


class Marking(logging.Handler):
    """Marks what the search tells it does."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    def emit(self, record: logging.LogRecord) -> None:
        self._clock.mark(record.getMessage())


def first_failure(layers: int, device: str, folder: Path) -> tuple[Failure, Sequence[Finding]]:
    """Check a forward pass of the model, and give back its failed call."""
    torch.manual_seed(0)
    model = BertForSequenceClassification(BertConfig(num_hidden_layers=layers, hidden_act="relu")).to(device)
    kept: list[tuple[Failure, Sequence[Finding]]] = []

    def investigator(failure: Failure, findings: Sequence[Finding]) -> Sequence[Finding]:
        kept.append((failure, findings))
        return findings

    def checked(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        options = CheckOptions(
            compiler_options=RELU_BUG[device], on_divergence="record", progress=False, report_dir=folder
        )
        return build_region(gm, inputs, options, None, silent=True, investigator=investigator)

    words, labels = torch.randint(0, 1000, (2, 64), device=device), torch.tensor([0, 1], device=device)
    torch.compile(model, backend=checked)(words, labels=labels)
    return kept[0]


def run_minifier(failure: Failure, limit: float) -> None:
    """PyTorch's minifier on the forward graph, asked by a bare tolerance, as its own accuracy check is."""
    capture = Capture()
    *_, partitioned = stages_of(failure.options, failure.mode)
    rerun_failure(failure, partitioned.compiler(capture))
    recorded = next(one for one in capture.recorded if one.kind in ("forward", "inference"))
    compiler = candidate.resolve_compiler(failure.options)
    tried = 0
    begun = time.perf_counter()

    def fails(gm: fx.GraphModule, inputs: Sequence[Any]) -> bool:
        nonlocal tried
        tried += 1
        with torch.no_grad():
            expected = gm(*inputs)
            actual = compiler(candidate.copy_graph(gm), list(inputs))(*inputs)
        return any(
            not torch.allclose(one, other, rtol=1e-3, atol=1e-3, equal_nan=True)
            for one, other in zip(expected, actual, strict=True)
            if isinstance(one, torch.Tensor)
        )

    def state(gm: fx.GraphModule, _inputs: Sequence[Any]) -> None:
        calls = sum(node.op.startswith("call_") for node in gm.graph.nodes)
        print(f"  {time.perf_counter() - begun:7.1f} s  {calls} call nodes, {tried} compiles", flush=True)

    def work() -> str:
        with without_compile_caches():
            minifier(recorded.graph, list(recorded.inputs or ()), fails, state)
        return f"done after {time.perf_counter() - begun:.1f} s"

    try:
        print(run_in_worker(work, timeout=limit))
    except CheckedBackendError as error:
        print(f"it ended after {time.perf_counter() - begun:.1f} s with an error: {error}"[:300])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--minifier", type=float, default=0.0, help="seconds for PyTorch's minifier")
    chosen = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    failure, findings = first_failure(chosen.layers, chosen.device, folder)
    print(
        f"BERT, {chosen.layers} layers, {sum(n.op.startswith('call_') for n in failure.graph.graph.nodes)} call nodes"
    )
    clock = Clock()
    investigate.log.addHandler(Marking(clock))
    investigate.log.setLevel(logging.INFO)
    [first, *_] = investigate.investigate(failure, findings)
    clock.mark("all done")
    print(f"op {first.op}, {first.evidence.get('reduced')}, repro {first.repro}, workaround {first.workaround}")
    print("repro confirmed:", first.repro_confirmed)
    if chosen.minifier:
        print("PyTorch's minifier:")
        run_minifier(failure, chosen.minifier)


if __name__ == "__main__":
    main()
