"""How many random programs are checked in a minute, and how many operators they cover.

    python tests/benchmarks/bench_fuzz.py [--programs N] [--batch N] [--compiler C] [--seed N]

Prints ratios taken in one run. The same programs are checked
- together, as fuzz does: several in one compile, in one process;
- alone: each with a compile of its own, in one process;
- apart: each with a compile of its own, in a process of its own, as it must be where a crash may cost one program only;
- unchecked: compiled together and run once. No check can be faster, so this bounds what sharing a compile can give.

All take turns, a batch at a time, each with a cache of Inductor of its own and one compiling thread. Making programs is
not counted. Starting processes is where "apart" is compared, and nowhere else. The processor's time, with that of the
C++ compiler, tells more than the clock where other processes run. Goal: 3 times as many programs in the same time.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch
from bench_first import cpu_seconds
from rich.console import Console
from rich.table import Table
from torch.utils._pytree import tree_leaves

from checked_backend.fuzz.build import build, make_inputs
from checked_backend.fuzz.examine import alike, examine
from checked_backend.fuzz.generate.draft import Choices
from checked_backend.fuzz.generate.make import make_program
from checked_backend.fuzz.program import FuzzProgram, decode_program, encode_program, merge

GOAL = 3.0
SIDES = ("together", "alone", "apart", "unchecked")


def batches(count: int, size: int, seed: int) -> list[list[FuzzProgram]]:
    """Programs as a run checks them: those that may share a compile next to each other. Dynamic ones never share."""
    kinds: dict[str, list[FuzzProgram]] = {}
    found: list[list[FuzzProgram]] = []
    for number in range(count):
        program = make_program(seed, number, Choices(dynamic=False))
        waiting = kinds.setdefault(alike(program), [])
        waiting.append(program)
        if len(waiting) == size:
            found.append(waiting[:])
            waiting.clear()
    return [*found, *(rest for rest in kinds.values() if rest)]


@dataclass
class Spent:
    """What a side has used.

    Attributes:
        seconds: By the clock, from the first program of a process to its last.
        processor: Seconds of processors, from the first program to the last.
        whole: By the clock, with what it takes to start processes.
        whole_processor: Seconds of processors, with what it takes to start processes.
        statuses: What came out.
    """

    seconds: float = 0.0
    processor: float = 0.0
    whole: float = 0.0
    whole_processor: float = 0.0
    statuses: Counter[str] = field(default_factory=Counter)


def check(programs: list[FuzzProgram], side: str, compiler: str, folder: Path, spent: Spent) -> None:
    """Check programs in a new process, or in one for each, and add up what it takes."""
    for part in [[program] for program in programs] if side == "apart" else [programs]:
        question = json.dumps({"programs": [encode_program(one) for one in part], "side": side, "compiler": compiler})
        own = {"TORCHINDUCTOR_CACHE_DIR": str(folder / side), "CHECKED_BACKEND_REPORT_DIR": str(folder / side)}
        began, before = time.perf_counter(), cpu_seconds()
        done = subprocess.run(
            [sys.executable, __file__, "--answer"],
            input=question,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            check=True,
            env={**os.environ, **own, "TORCHINDUCTOR_COMPILE_THREADS": "1"},
        )
        spent.whole += time.perf_counter() - began
        spent.whole_processor += cpu_seconds() - before
        answer = json.loads(done.stdout.splitlines()[-1])
        spent.seconds += answer["seconds"]
        spent.processor += answer["processor"]
        spent.statuses += Counter(answer["statuses"])


def run_unchecked(programs: list[FuzzProgram], compiler: str) -> dict[str, int]:
    """Compile programs together and run them once, forward and backward; in halves where that raises."""
    torch.compiler.reset()
    try:
        with torch.set_grad_enabled(programs[0].gradients):
            both = merge(programs)
            results = torch.compile(build(both), backend=compiler, fullgraph=True)(*make_inputs(both.inputs))
            roots = [one for one in tree_leaves(results) if isinstance(one, torch.Tensor) and one.requires_grad]
            if programs[0].gradients:
                torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
    except Exception:  # Dynamo or the compiler gives up on one of them
        if len(programs) == 1:
            return {"raises": 1}
        middle = len(programs) // 2
        return Counter(run_unchecked(programs[:middle], compiler)) + Counter(run_unchecked(programs[middle:], compiler))
    return {"runs": len(programs)}


def answer(question: str) -> None:
    """Check the programs of a question, and print how long it took and what came out."""
    warnings.simplefilter("ignore")
    asked = json.loads(question)
    programs = [decode_program(text) for text in asked["programs"]]
    torch.compile(torch.neg, backend=asked["compiler"])(torch.ones(3))  # what the first compile of a process loads
    parts = [[program] for program in programs] if asked["side"] in ("alone", "apart") else [programs]
    began, before = time.perf_counter(), cpu_seconds()
    if asked["side"] == "unchecked":
        statuses = Counter(run_unchecked(programs, asked["compiler"]))
    else:
        statuses = Counter(
            result.status.value for part in parts for _, result in examine(dict(enumerate(part)), asked["compiler"])
        )
    spent = {"seconds": time.perf_counter() - began, "processor": cpu_seconds() - before}
    print(json.dumps({**spent, "statuses": statuses}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=32)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--compiler", default="inductor")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--answer", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.answer:
        answer(sys.stdin.read())
        return
    warnings.simplefilter("ignore")
    groups = batches(chosen.programs, chosen.batch, chosen.seed)
    spent = {side: Spent() for side in SIDES}
    console = Console(width=140)
    with tempfile.TemporaryDirectory(prefix="bench-fuzz-") as folder:
        for number, programs in enumerate(groups):
            before = {side: spent[side].whole_processor for side in SIDES}
            turn = number % len(SIDES)
            for side in SIDES[turn:] + SIDES[:turn]:
                check(programs, side, chosen.compiler, Path(folder), spent[side])
            words = ", ".join(f"{spent[side].whole_processor - before[side]:.1f} s {side}" for side in SIDES)
            console.print(f"batch {number + 1} of {len(groups)}, {len(programs)} programs: {words} (processor)")
    table = Table(title=f"{chosen.programs} programs, {chosen.compiler}")
    for column in ("compiled", "programs a minute", "seconds", "processor", "with starts", "processor", "results"):
        table.add_column(column, justify="right")
    for side, one in spent.items():
        results = ", ".join(f"{count} {status}" for status, count in sorted(one.statuses.items()))
        times = (one.seconds, one.processor, one.whole, one.whole_processor)
        minute = 60 * chosen.programs / one.whole
        table.add_row(side, f"{minute:.1f}", *(f"{seconds:.1f}" for seconds in times), results)
    console.print(table)
    console.print(f"{len({op for programs in groups for program in programs for op in program.ops})} operations")
    together, alone, apart, unchecked = (spent[side] for side in SIDES)
    for words, clock, processor in (
        ("together against apart", apart.whole / together.whole, apart.whole_processor / together.whole_processor),
        ("together against alone", alone.seconds / together.seconds, alone.processor / together.processor),
        ("unchecked against alone", alone.seconds / unchecked.seconds, alone.processor / unchecked.processor),
    ):
        console.print(f"{words}: {clock:.2f} times as many in the same time, {processor:.2f} by the processor's time")
    console.print(f"goal of the first two: {GOAL}; no check that shares a compile is faster than the third")


if __name__ == "__main__":
    main()
