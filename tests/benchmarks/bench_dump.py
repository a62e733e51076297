"""What a dump costs next to the AOT compile of the same graph, and next to a copy of the same values.

Run it as a program: ``OMP_NUM_THREADS=1 python tests/benchmarks/bench_dump.py``. It is not a timed test: it prints
ratios of times taken in one run, on one thread, the minimum of a few rounds.

With torch 2.13 on two busy cores of a Xeon: a dump takes 0.06 of the AOT compile (goal: under 0.5), values are written
at 0.58 of the speed of a copy (goal: 0.5 or more).
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from checked_backend.backends import nop
from checked_backend.dump import RegionDump


def chain(x: torch.Tensor, nodes: int) -> torch.Tensor:
    for _ in range(nodes // 4):
        x = (x * 1.01 + 0.5).sin().relu()
    return x


def fastest(program: Callable[[], Any], rounds: int) -> float:
    best = float("inf")
    for _ in range(rounds):
        start = time.perf_counter()
        program()
        best = min(best, time.perf_counter() - start)
    return best


def compile_time(nodes: int, rounds: int) -> tuple[float, float]:
    """Seconds of an AOT compile, and seconds that dumping its Dynamo and inference graphs takes of it."""
    folder = tempfile.mkdtemp()
    spent = [0.0]
    real = RegionDump.write

    def timed(self: RegionDump, kind: str, gm: torch.fx.GraphModule) -> None:
        start = time.perf_counter()
        real(self, kind, gm)
        spent[0] += time.perf_counter() - start

    best = (float("inf"), float("inf"))
    RegionDump.write = timed  # type: ignore[method-assign]
    try:
        for _ in range(rounds):
            torch._dynamo.reset()
            captured: list[Any] = []

            def backend(gm: torch.fx.GraphModule, inputs: list[torch.Tensor], into: list[Any] = captured) -> Any:
                into.append((gm, inputs))
                return gm.forward

            with torch.no_grad():
                torch.compile(chain, backend=backend)(torch.ones(8), nodes)
                ((gm, inputs),) = captured
                spent[0] = 0.0
                start = time.perf_counter()
                nop(gm, inputs, options={"dump": folder})
                total = time.perf_counter() - start
            best = min(best, (total - spent[0], spent[0] / 2), key=sum)
    finally:
        RegionDump.write = real  # type: ignore[method-assign]
        shutil.rmtree(folder)
    return best


def value_bandwidth(mib: int, rounds: int) -> tuple[float, float]:
    """Bytes per second of completing a dump with values, and of copying the file that comes of it."""
    size = mib << 20
    x = torch.randn(size // 4)
    graph = torch.fx.Graph()
    node = graph.placeholder("x")
    node.meta["val"] = x
    graph.output((node,))
    gm = torch.fx.GraphModule(torch.nn.Module(), graph)
    best = copied = float("inf")
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(rounds):
            dump = RegionDump.claim(Path(folder), "x", values=True)
            if dump is None:
                raise SystemExit("the disk is full")
            dump.write("inference", gm)
            best = min(best, fastest(lambda dump=dump: dump.observe("inference", [x]), 1))  # type: ignore[misc]
            (file,) = Path(folder).rglob("inputs.safetensors")
            copied = min(copied, fastest(lambda file=file: shutil.copyfile(file, f"{folder}/copy"), 1))  # type: ignore[misc]
            file.unlink()
    return size / best, size / copied


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    aot, dump = compile_time(chosen.nodes, chosen.rounds)
    print(f"{chosen.nodes} nodes: AOT compile {aot:.3f} s, dump {dump:.3f} s, ratio {dump / aot:.2f} (goal < 0.5)")
    saved, copied = value_bandwidth(chosen.mib, chosen.rounds)
    ratio = saved / copied
    print(
        f"{chosen.mib} MiB: dump {saved / 1e9:.2f} GB/s, copy {copied / 1e9:.2f} GB/s, ratio {ratio:.2f} (goal >= 0.5)"
    )


if __name__ == "__main__":
    main()
