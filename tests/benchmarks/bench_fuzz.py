"""How many random programs are checked in a minute, and how many operators they cover.

    python tests/benchmarks/bench_fuzz.py [--programs N] [--batch N] [--compiler C] [--seed N]

Prints ratios taken in one run: the same programs are checked as fuzz does, several in one compile, and each with a
compile of its own. Both take turns, a batch at a time, each in a process of its own with an empty cache of Inductor
and one compiling thread. Starting processes and making programs is not counted. The processor's time, with that of the
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

import torch
from rich.console import Console
from rich.table import Table

from checked_backend.fuzz.examine import alike, examine
from checked_backend.fuzz.generate.draft import Choices
from checked_backend.fuzz.generate.make import covered, make_program, rules_for
from checked_backend.fuzz.program import FuzzProgram, decode_program, encode_program

GOAL = 3.0
SIDES = ("together", "alone")


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


def answer(question: str) -> None:
    """Check the programs of a question, and print how long it took and what came out."""
    warnings.simplefilter("ignore")
    asked = json.loads(question)
    programs = [decode_program(text) for text in asked["programs"]]
    torch.compile(torch.neg, backend=asked["compiler"])(torch.ones(3))  # what the first compile of a process loads
    parts = [programs] if asked["side"] == "together" else [[program] for program in programs]
    began, before = time.perf_counter(), processor_seconds()
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
    for number, programs in enumerate(groups):
        for side in SIDES if number % 2 else SIDES[::-1]:
            spent, used, found = checked(programs, side, chosen.compiler)
            seconds[side] += spent
            processor[side] += used
            statuses[side] += found
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
    console = Console(width=140)
    console.print(table)
    console.print(f"{len({pair.split(' ')[0] for pair in pairs})} operations, {len(pairs)} with their dtypes")
    by_clock, by_processor = (spent["alone"] / spent["together"] for spent in (seconds, processor))
    console.print(
        f"{chosen.batch} programs in one compile: {by_clock:.2f} times as many in the same time, "
        f"{by_processor:.2f} by the processor's time (goal {GOAL})"
    )


if __name__ == "__main__":
    main()
