"""Tell a value that is baked into the compiled program from one that is computed wrongly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from checked_backend.checking.merge import VALUES, Shown
from checked_backend.checking.program import ProgramCall
from checked_backend.checking.program_run import ProgramRun
from checked_backend.findings import Finding, Kind

__all__ = ["with_baked_values"]

MOST_CALLS = 3
"""Calls that are compiled once more, each alone."""


def with_baked_values(
    shown: Sequence[Shown], run: ProgramRun, alone: Callable[[ProgramCall], Sequence[Finding]]
) -> list[Shown]:
    """Compile again for single calls that go wrong in a program that was compiled for another call.

    Args:
        shown: The findings of a run with variants of the user's own call.
        run: The run that has these findings.
        alone: Compiles and runs a single call; returns its findings.

    Returns:
        The findings. If a call is right when the program is compiled for it, its finding says so.
    """
    doubtful = [
        entry
        for entry in shown
        if entry.calls[0] > 0
        and entry.finding.kind in VALUES
        and not (run.program.continued or run.program.calls[entry.calls[0]].relaid)
    ]
    wrong: dict[int, set[str]] = {}
    for index in list(dict.fromkeys(entry.calls[0] for entry in doubtful))[:MOST_CALLS]:
        found = alone(replace(run.program.calls[index], label=""))
        wrong[index] = {finding.subject for finding in found if finding.kind.fails}
    return [
        _baked(entry)
        if entry in doubtful and entry.finding.subject not in wrong.get(entry.calls[0], {entry.finding.subject})
        else entry
        for entry in shown
    ]


def _baked(entry: Shown) -> Shown:
    message = (
        "it is right when the program is compiled for this call: something of the call that it was compiled for is "
        "baked into the compiled program"
    )
    return replace(entry, finding=replace(entry.finding, kind=Kind.LOGIC, detail="logic.baked", message=message))
