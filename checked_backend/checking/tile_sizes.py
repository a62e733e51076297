"""Sizes around powers of two, where kernels change: whole tiles, one element more or less, blocks of threads.

These calls are as large as time and memory allow. Sizes that do not fit are left out, and reported.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import TypeAlias

import sympy

from checked_backend.checking.program import Program, ProgramCall
from checked_backend.checking.sizes import Shapes, call_of_sizes, small_choices
from checked_backend.checking.stopwatch import Stopwatch
from checked_backend.findings import Skip
from checked_backend.report.ledger import Ledger

__all__ = ["TILE_SIZES", "tile_sizes"]

TILE_SIZES = (
    *(17, 255, 1024, 65, 31, 129, 15, 513, 64, 33),
    *(127, 257, 16, 32, 63, 128, 256, 511, 512, 1023, 1025),
    *(200, 777, 2047, 2048, 2049, 4095, 4096, 4097),
)
"""The sizes to try. Those that each stand for many others come first."""

MOST_SECONDS = 20.0
"""Seconds that all these calls may take together."""

COPIES = 12
"""How many copies of a program's tensors are in memory: gradients, both sides, float64, control runs."""

SHARE_OF_MEMORY = 0.25
MOST_BYTES = 8 << 30

SECONDS_PER_BYTE = 2e-8
"""The least time to check a call, for each byte that the program computes: some twenty runs at 1 GB/s."""

HALF = 50
"""How many times as long a byte of a tensor at 16 bits takes: each operator is also checked by itself.

Measured on one core, for a program of six operators: 7e-9 s a byte in float32, 5e-7 s in bfloat16; with gradients
5e-8 s and 2e-6 s.
"""

REFUSALS = 2
"""After this many sizes that eager refuses in a row, with none accepted, no more sizes are tried."""

_FIRST_NUMBER = 1000

Choice: TypeAlias = tuple[sympy.Symbol, ...]
"""Symbols that get a size together."""


@dataclass(slots=True)
class _Sweep:
    """One or more dimensions that grow together.

    Attributes:
        symbols: The symbols of these dimensions.
        place: The dimensions, for people.
        tried: Sizes that were tried.
        refused: How many of them eager refused in a row.
        accepted: Whether eager accepted one.
        left_out: Sizes that were not tried, by reason.
    """

    symbols: Choice
    place: str
    tried: list[int] = field(default_factory=list)
    refused: int = 0
    accepted: bool = False
    left_out: dict[str, list[int]] = field(default_factory=dict)


def tile_sizes(program: Program, shapes: Shapes, ledger: Ledger, most: int | None = None) -> Iterator[ProgramCall]:
    """Calls with sizes around powers of two: for each dynamic dimension alone, and for all together.

    Args:
        shapes: The dynamic sizes.
        ledger: Receives the sizes that were tried, and those that were not.
        most: How many calls there are at most; None: as many as time allows. Programs of other sizes get others.
    """
    sweeps = _sweeps(shapes)
    if not sweeps:
        return
    known = list(small_choices(shapes))
    costs = _Costs(shapes, _free_memory() * SHARE_OF_MEMORY)
    number = _FIRST_NUMBER
    tries = list(product(TILE_SIZES, sweeps))
    chosen = _some(len(tries), most, sum(shapes.hints.values()))
    for place, (size, sweep) in enumerate(tries):
        values = {**shapes.hints, **dict.fromkeys(sweep.symbols, size)}
        if values in known or values == shapes.hints:
            continue
        why = _refusing(sweep) or (costs.forbid(values) if place in chosen else f"{most} calls are made in all")
        if why:
            sweep.left_out.setdefault(why, []).append(size)
            continue
        number += 1
        made = call_of_sizes(program, shapes, values, number)
        if made is None:
            continue
        watch = Stopwatch()
        yield made
        costs.took(values, watch.seconds())
        _note(sweep, size, refused=_is_refused(made, ledger))
    for sweep in sweeps:
        _tell(sweep, ledger)


def _some(count: int, most: int | None, first: int) -> Collection[int]:
    """So many places of all, evenly spread from the first."""
    if most is None or most >= count:
        return range(count)
    return {(first + place * count // most) % count for place in range(most)}


def _sweeps(shapes: Shapes) -> list[_Sweep]:
    """The sweeps. All dimensions together come first: most faults show there, in whichever dimension they are."""
    symbols = list(shapes.hints)
    alone = [_Sweep((symbol,), shapes.place(symbol)) for symbol in symbols]
    if len(symbols) < 2:
        return alone
    return [_Sweep(tuple(symbols), " and ".join(sweep.place for sweep in alone)), *alone]


class _Costs:
    """The time and the memory that a call may take.

    Args:
        shapes: Which sizes are dynamic.
        memory: The bytes that it may take.
    """

    def __init__(self, shapes: Shapes, memory: float) -> None:
        self._shapes = shapes
        self._memory = min(memory, MOST_BYTES)
        self._spent = 0.0
        self._pace = SECONDS_PER_BYTE

    def forbid(self, values: Mapping[sympy.Symbol, int]) -> str:
        """Why a call of these sizes is not made; "" if it is made."""
        memory = self._shapes.bytes_at(values) + 3 * self._shapes.half_bytes_at(values)  # most copies are in float64
        if memory * COPIES > self._memory:
            return f"more memory than the {self._memory / 2**30:.1f} GiB that they may need"
        if self._spent + self._work(values) * self._pace > MOST_SECONDS:
            return f"more time than the {MOST_SECONDS:.0f} s that all these sizes may take"
        return ""

    def took(self, values: Mapping[sympy.Symbol, int], seconds: float) -> None:
        """Learn from a call how long others of its size will take."""
        self._spent += seconds
        work = self._work(values)
        if work > _LARGE:
            self._pace = max(self._pace, seconds / work)

    def _work(self, values: Mapping[sympy.Symbol, int]) -> int:
        """The bytes that a call computes, those at 16 bits counted as often as they take longer."""
        return self._shapes.bytes_at(values) + (HALF - 1) * self._shapes.half_bytes_at(values)


_LARGE = 4 << 20
"""The time of a call that computes fewer bytes says nothing about larger calls."""


def _free_memory() -> float:
    """Bytes that the machine has to spare."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return float(line.split()[1]) * 1024
    except OSError:  # no Linux
        pass
    try:
        return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")) / 4
    except (ValueError, OSError, AttributeError):
        return float(2 << 30)


def _is_refused(call: ProgramCall, ledger: Ledger) -> bool:
    return any(
        skip.subject == call.label and skip.reason.startswith("eager refuses") for skip in ledger.coverage().skipped
    )


def _note(sweep: _Sweep, size: int, *, refused: bool) -> None:
    sweep.tried.append(size)
    sweep.accepted |= not refused
    sweep.refused = sweep.refused + 1 if refused else 0


def _refusing(sweep: _Sweep) -> str:
    return "eager refuses the first of them" if sweep.refused >= REFUSALS and not sweep.accepted else ""


def _tell(sweep: _Sweep, ledger: Ledger) -> None:
    if sweep.tried:
        ledger.note(f"sizes of {sweep.place} that were tried around powers of two: {_listed(sweep.tried)}")
    for why, sizes in sweep.left_out.items():
        ledger.skip(Skip(f"sizes of {sweep.place}", f"left out {_listed(sizes)}: {why}"))


def _listed(sizes: Iterable[int]) -> str:
    """``15-17, 31``."""
    runs: list[list[int]] = []
    for size in sorted(sizes):
        if runs and size == runs[-1][-1] + 1:
            runs[-1].append(size)
        else:
            runs.append([size])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
