"""How much of a first checked call goes to ``measure``, with the compiled loop and without it.

    OMP_NUM_THREADS=1 python tests/benchmarks/bench_first_call.py [--rounds 3]

Without the loop, which the quick test of every call needs in any case, all blocks are read in float64. Three kinds of
candidates matter: one equal to eager bit for bit (``measure`` is hardly asked), one that rounds otherwise, and one that
is wrong (more control runs, each measured). The share is ``measure``'s time in the whole check of the first forward and
backward pass, localizing left out. Compiling is no part of it: the candidate is AOT autograd without a code generator.
Ratios are taken in one run, in turns; the median counts.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from bench_region import workload
from rich.console import Console
from rich.table import Table

import checked_backend as cb
from checked_backend.findings import Metrics
from checked_backend.numerics import measure as module
from tests.support import faults
from tests.support.check_tools import rounding_otherwise

USERS = ("checked_backend.verdict.decide.measure", "checked_backend.regions.operator_check.findings.measure")


def without_loop(*, reference: torch.Tensor, candidate: torch.Tensor) -> Metrics:
    """Measure block by block in float64."""
    with mock.patch.object(module, "fused_loop", return_value=None):
        return module.measure(reference=reference, candidate=candidate)


@contextmanager
def timed(function: Callable[..., Metrics]) -> Iterator[list[float]]:
    """Have checks measure with a function, and take the time of each call."""
    seconds: list[float] = []

    def measure(**tensors: torch.Tensor) -> Metrics:
        began = time.perf_counter()
        try:
            return function(**tensors)
        finally:
            seconds.append(time.perf_counter() - began)

    with mock.patch(USERS[0], measure), mock.patch(USERS[1], measure):
        yield seconds


def first_call(name: str, candidate: object, function: Callable[..., Metrics]) -> tuple[float, float, int]:
    """Seconds of a first checked forward and backward pass; of them in ``measure``; and how often it was asked."""
    torch.compiler.reset()
    model, args = workload(name)
    options = {"compiler": candidate, "on_divergence": "record", "localize": False}
    with cb.collect(closing=False), timed(function) as seconds:
        compiled = torch.compile(model, backend="numcheck", options=options)
        began = time.perf_counter()
        compiled(*args).backward()
        whole = time.perf_counter() - began
    return whole, sum(seconds), len(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    candidates = {
        "equal": "aot_eager",
        "rounds otherwise": rounding_otherwise,
        "wrong": faults.spoiled_output(lambda loss: loss * 1.01),
    }
    functions = {"as it is": module.measure, "without the loop": without_loop}
    table = Table("model", "candidate", "measured", *(f"share, {name}" for name in functions), "time of both, ratio")
    for name in ("bert", "resnet"):
        for kind, candidate in candidates.items():
            taken: dict[str, list[tuple[float, float, int]]] = {each: [] for each in functions}
            for _ in range(options.rounds):
                for each, function in functions.items():
                    taken[each].append(first_call(name, candidate, function))
            shares = [statistics.median(part / whole for whole, part, _ in runs) for runs in taken.values()]
            inside = [statistics.median(part for _, part, _ in runs) for runs in taken.values()]
            ratio = f"{inside[1] / inside[0]:.1f}" if inside[0] else "-"
            table.add_row(name, kind, str(taken["as it is"][0][2]), *(f"{share:.1%}" for share in shares), ratio)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
