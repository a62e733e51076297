"""What ``budget`` costs: the share of a run that checking takes, and a call that is not checked.

    python tests/benchmarks/bench_budget.py [--share S] [--seconds N] [--regions N ...] [--compiler NAME] [--cpu-time]

Prints ratios taken in one run. The same program without numcheck, and with it, takes turns by short blocks of steps,
so that both see the same load of the machine. The share asked is held against the share that was paid
and against the ratio of both times. Compiling is not in either. On a machine that others use too, ``--cpu-time``
takes the processor time of this process for the time, also in the budget.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from tiny_region import seconds_per_call
from torch import nn

import checked_backend as cb
from checked_backend.regions import schedule

Step = Callable[[], None]


class Net(nn.Module):
    """As many blocks as regions are asked for, with a graph break between any two."""

    def __init__(self, regions: int, width: int = 192) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width), nn.LayerNorm(width))
            for _ in range(regions)
        )


def trained(regions: int, compiler: str, **options: float) -> Step:
    """A training step of which each block is a region."""
    torch.manual_seed(0)
    net = Net(regions)
    chosen = {"compiler": compiler, "on_divergence": "record", "localize": False, **options}
    plain = {"fallback_random": True} if compiler == "inductor" else None
    blocks = [
        torch.compile(block, backend=cb.numcheck, options=chosen)
        if options
        else torch.compile(block, backend=compiler, options=plain)
        for block in net.blocks
    ]
    x = torch.randn(256, 192)

    def step() -> None:
        net.zero_grad()
        y = x
        for block in blocks:
            y = block(y)
        y.square().mean().backward()

    return step


def timed(step: Step, times: int, now: Callable[[], float]) -> float:
    began = now()
    for _ in range(times):
        step()
    return now() - began


class OwnTime:
    """A clock that stands still while other programs are measured."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._away = 0.0
        self._left = 0.0

    def __call__(self) -> float:
        return self._now() - self._away

    def leave(self) -> None:
        self._left = self._now()

    def come_back(self) -> None:
        self._away += self._now() - self._left


def measure(
    regions: int, compiler: str, share: float, seconds: float, now: Callable[[], float]
) -> tuple[float, float, str]:
    """The share that was paid, the ratio of times less one, and how many calls of each region were checked."""
    clock = OwnTime(now)
    schedule.clock = clock
    schedule.budget_of.cache_clear()
    torch.compiler.reset()
    with cb.collect() as session:
        plain, watched = trained(regions, compiler), trained(regions, compiler, budget=share)
        plain()
        watched()
        began, spent_before = clock(), schedule.budget_of(share).spent
        own = with_checks = 0.0
        while clock() - began < seconds:
            with_checks += timed(watched, 5, now)
            clock.leave()
            own += timed(plain, 5, now)
            clock.come_back()
        paid = (schedule.budget_of(share).spent - spent_before) / with_checks
    checked = " ".join(f"{region.checked_calls}/{region.calls}" for region in session.report.coverage.regions)
    return paid, with_checks / own - 1, checked


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--share", type=float, default=0.01)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--regions", type=int, nargs="*", default=[1, 5, 50])
    parser.add_argument("--compiler", default="aot_eager")
    parser.add_argument("--cpu-time", action="store_true")
    chosen = parser.parse_args()
    now = time.process_time if chosen.cpu_time else time.perf_counter
    torch.set_num_threads(1)
    table = Table(title=f"budget={chosen.share}, {chosen.compiler}, {chosen.seconds:.0f} s of the program's own")
    for column in ("regions", "share paid", "of what was asked", "time ratio - 1", "checked calls"):
        table.add_column(column, justify="right")
    for regions in chosen.regions:
        paid, ratio, checked = measure(regions, chosen.compiler, chosen.share, chosen.seconds, now)
        table.add_row(str(regions), f"{paid:.4f}", f"{paid / chosen.share:.2f}", f"{ratio:+.4f}", checked)
    console = Console(width=160)
    console.print(table)
    bare, watched = seconds_per_call(3000, budget=1e-6)
    console.print(
        f"a call that is not checked: {bare * 1e6:.1f} us bare, {watched * 1e6:.1f} us through numcheck, "
        f"{(watched - bare) * 1e6:+.1f} us (goal: under 20)"
    )


if __name__ == "__main__":
    main()
