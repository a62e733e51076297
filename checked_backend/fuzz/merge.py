"""Several programs as one: for what is wrong only where they share a compile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from checked_backend.fuzz.program import FuzzProgram, Input, Statement, map_refs

__all__ = ["merge"]


def merge(programs: Sequence[FuzzProgram]) -> FuzzProgram:
    """One program that does what several do, one after the other, with the inputs and the results of all.

    Args:
        programs: At least one. All are differentiated or none, all are dynamic or none.
    """
    inputs: list[Input] = []
    calls: list[Statement] = []
    returns: list[int] = []
    count = sum(len(program.inputs) for program in programs)
    for program in programs:
        numbers = [*range(len(inputs), len(inputs) + len(program.inputs))]
        numbers += range(count + len(calls), count + len(calls) + len(program.calls))
        inputs += [
            given if given.shares is None else replace(given, shares=numbers[given.shares]) for given in program.inputs
        ]
        calls += [map_refs(call, numbers.__getitem__) for call in program.calls]
        returns += [numbers[value] for value in program.returns]
    first = programs[0]
    return FuzzProgram(tuple(inputs), tuple(calls), tuple(returns), first.gradients, first.dynamic)
