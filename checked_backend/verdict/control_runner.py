"""Make the control runs of a check. A run that fails is recorded in the coverage, and the check does without it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from checked_backend.errors import is_out_of_memory
from checked_backend.findings import Skip
from checked_backend.verdict.control_runs import Control, ControlRuns, MadeElsewhereError, PostponedError
from checked_backend.verdict.decisions import Decisions

__all__ = ["ControlRunner", "short"]

Given = TypeVar("Given")


class ControlRunner:
    """Makes control runs, and records those that could not be made.

    Args:
        controls: Makes the runs.
        decisions: Receives a skip for each control that could not run.

    Attributes:
        controls: Makes the runs.
        missing: For each control that could not run, the reason.
        elsewhere: Controls that another check of the same program makes.
        short_of_memory: Controls that could not run for want of memory.
    """

    def __init__(self, controls: ControlRuns, decisions: Decisions) -> None:
        self.controls = controls
        self.missing: dict[Control, str] = {}
        self.elsewhere: set[Control] = set()
        self.short_of_memory: set[Control] = set()
        self._decisions = decisions

    def of(self, controls: ControlRuns) -> ControlRunner:
        """A runner for other controls that records in the same coverage."""
        runs = ControlRunner(controls, self._decisions)
        runs.short_of_memory = self.short_of_memory
        return runs

    def run(self, control: Control, make: Callable[[], Given | None]) -> Given | None:
        """The result of a control run; None if it could not run, or has nothing to give.

        Raises:
            PostponedError: The comparison is postponed until the run is earned.
        """
        try:
            return make()
        except MadeElsewhereError:
            self.elsewhere.add(control)
            return None
        except PostponedError:
            raise
        except Exception as error:  # recorded: a control that could not run is in the coverage
            why = short(error)
            if is_out_of_memory(error):
                self.short_of_memory.add(control)
            self.missing[control] = why
            skip = Skip(f"control: {control.value}", why)
            if skip not in self._decisions.skips:
                self._decisions.skips.append(skip)
            return None


def short(error: BaseException) -> str:
    """An exception in one line, marked as such if it is for want of memory."""
    lines = str(error).strip().splitlines()
    told = f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
    return f"unsupported: memory: {told}" if is_out_of_memory(error) else told
