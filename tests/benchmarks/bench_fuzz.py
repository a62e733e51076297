"""How many random programs are checked in a minute, and how many operators they cover.

    python tests/benchmarks/bench_fuzz.py [--programs N] [--batch N] [--compiler C] [--seed N]

Prints ratios taken in one run: the same programs are checked as fuzz does, several in one compile, and each with a
compile of its own. They are also compiled together and run once, unchecked: no check can be faster than that, so this
is the bound of what sharing a compile can give. All take turns, a batch at a time, each in a process of its own with
an empty cache of Inductor and one compiling thread. Starting processes and making programs is not counted. The
processor's time, with that of the C++ compiler, tells more than the clock where other processes run. Goal: 3 times as
many programs in the same time.
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

import torch
from rich.console import Console
from rich.table import Table
from torch.utils._pytree import tree_leaves

from checked_backend.fuzz.build import build, inputs_for
from checked_backend.fuzz.examine import alike, examine
from checked_backend.fuzz.generate.choices import Choices
from checked_backend.fuzz.generate.make import covered, rules_for
from checked_backend.fuzz.program import FuzzProgram, decode_program, encode_program
from checked_backend.fuzz.strategies import make_program

GOAL = 3.0
SIDES = ("together", "alone", "unchecked")


def batches(count: int, size: int, seed: int) -> list[list[FuzzProgram]]:
    """Programs as a run checks them: those that may share a compile next to each other. Dynamic ones never share."""
    rules = rules_for(())
    kinds: dict[str, list[FuzzProgram]] = {}
    found: list[list[FuzzProgram]] = []
    for number in range(count):
        program = make_program(seed, number, Choices(dynamic=False), rules)
        waiting = kinds.setdefault(alike(program), [])
        waiting.append(program)
        if len(waiting) == size:
            found.append(waiting[:])
            waiting.clear()
    return [*found, *(rest for rest in kinds.values() if rest)]


def checked(programs: list[FuzzProgram], side: str, compiler: str) -> tuple[float, float, Counter[str]]:
    """How long checking takes in a new process, by the clock and of processors; and what came out, by status."""
    question = json.dumps({"programs": [encode_program(one) for one in programs], "side": side, "compiler": compiler})
    with tempfile.TemporaryDirectory(prefix="bench-fuzz-") as folder:
        own = {"TORCHINDUCTOR_CACHE_DIR": folder, "CHECKED_BACKEND_REPORT_DIR": folder}
        environment = {**os.environ, **own, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, __file__, "--answer"],
            input=question,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            check=True,
            env=environment,
        )
    answer = json.loads(done.stdout.splitlines()[-1])
    return float(answer["seconds"]), float(answer["processor"]), Counter(answer["statuses"])


def processor_seconds() -> float:
    """What this process and those that it has waited for have used."""
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


def unchecked(programs: list[FuzzProgram], compiler: str) -> dict[str, int]:
    """Compile programs together and run them once, forward and backward; in halves where that raises."""
    torch.compiler.reset()
    try:
        with torch.set_grad_enabled(programs[0].gradients):
            results = torch.compile(build(programs), backend=compiler, fullgraph=True)(*inputs_for(programs))
            roots = [one for one in tree_leaves(results) if isinstance(one, torch.Tensor) and one.requires_grad]
            if programs[0].gradients:
                torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
    except Exception:  # Dynamo or the compiler gives up on one of them
        if len(programs) == 1:
            return {"raises": 1}
        middle = len(programs) // 2
        return Counter(unchecked(programs[:middle], compiler)) + Counter(unchecked(programs[middle:], compiler))
    return {"runs": len(programs)}


def answer(question: str) -> None:
    """Check the programs of a question, and print how long it took and what came out."""
    warnings.simplefilter("ignore")
    asked = json.loads(question)
    programs = [decode_program(text) for text in asked["programs"]]
    torch.compile(torch.neg, backend=asked["compiler"])(torch.ones(3))  # what the first compile of a process loads
    parts = [[program] for program in programs] if asked["side"] == "alone" else [programs]
    began, before = time.perf_counter(), processor_seconds()
    if asked["side"] == "unchecked":
        statuses = Counter(unchecked(programs, asked["compiler"]))
    else:
        statuses = Counter(result.status.value for part in parts for _, result in examine(part, asked["compiler"]))
    spent = {"seconds": time.perf_counter() - began, "processor": processor_seconds() - before}
    print(json.dumps({**spent, "statuses": statuses}))


def main() -> None:
    """Measure and print."""
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
    seconds, processor = dict.fromkeys(SIDES, 0.0), dict.fromkeys(SIDES, 0.0)
    statuses: dict[str, Counter[str]] = {side: Counter() for side in SIDES}
    console = Console(width=140)
    for number, programs in enumerate(groups):
        here: dict[str, float] = {}
        for side in SIDES[number % 3 :] + SIDES[: number % 3]:
            spent, used, found = checked(programs, side, chosen.compiler)
            seconds[side] += spent
            processor[side] += used
            statuses[side] += found
            here[side] = used
        words = ", ".join(f"{used:.1f} s {side}" for side, used in sorted(here.items()))
        console.print(f"batch {number + 1} of {len(groups)}, {len(programs)} programs: {words} (processor)")
    pairs = {pair for programs in groups for program in programs for pair in covered(program)}
    table = Table(title=f"{chosen.programs} programs, {chosen.compiler}")
    for column in ("compiled", "programs a minute", "seconds", "processor", "results"):
        table.add_column(column, justify="right")
    for side in SIDES:
        results = ", ".join(f"{count} {status}" for status, count in sorted(statuses[side].items()))
        table.add_row(
            side,
            f"{60 * chosen.programs / seconds[side]:.1f}",
            f"{seconds[side]:.1f}",
            f"{processor[side]:.1f}",
            results,
        )
    console.print(table)
    console.print(f"{len({pair.split(' ')[0] for pair in pairs})} operations, {len(pairs)} with their dtypes")
    for side, words in ("together", f"goal {GOAL}"), ("unchecked", "no check can be faster"):
        by_clock, by_processor = (spent["alone"] / spent[side] for spent in (seconds, processor))
        console.print(
            f"{chosen.batch} programs in one compile, {side}: {by_clock:.2f} times as many in the same time as alone, "
            f"{by_processor:.2f} by the processor's time ({words})"
        )


if __name__ == "__main__":
    main()
