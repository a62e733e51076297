"""Compare the process's settings that a region's candidate left with eager's, and set differing ones to eager's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from checked_backend._torch.dynamo import compile_lock
from checked_backend.findings import Finding, Skip
from checked_backend.regions.process_state import (
    CHANGED_ELSEWHERE,
    FILTERS,
    GRAD_MODE,
    ProcessState,
    of_process,
    settings_changed,
)

__all__ = ["LeftSettings"]


@dataclass(slots=True)
class LeftSettings:
    """Compares settings after a candidate ran.

    When the user's program changes a mode, Dynamo makes that change in its own code around the graph, or in the graph,
    from which AOT autograd removes it. So the settings before the call are right, and those that eager left are right.
    Grad mode alone is changed by the graph and by nothing around it: there only what eager left is right.

    Attributes:
        again: Runs the candidate once more, on copies.
        skip: Notes settings that could not be decided about.
        others_ran: Whether another thread ran meanwhile.
        during: The part of the call, for people; "" for the call itself.
    """

    again: Callable[[], object]
    skip: Callable[[Skip], None]
    others_ran: bool
    during: str = ""

    def findings(
        self,
        before: ProcessState,
        expected: ProcessState,
        after: ProcessState,
        *,
        thread: bool = True,
        ran: bool = False,
    ) -> list[Finding]:
        """Findings about settings. These are set to eager's. Settings that another thread may have changed stay.

        Args:
            before: The state before the candidate ran.
            expected: The state that eager left.
            after: The state that the candidate left.
            thread: Also look at settings that each thread has for itself.
            ran: Whether eager ran to the graph's end, so that `expected` has what the graph changes.
        """
        names = before.changed(after, expected)
        if ran and GRAD_MODE not in names and expected.values[GRAD_MODE] != after.values[GRAD_MODE]:
            names = (GRAD_MODE, *names)
        names = names if thread else of_process(names)
        if not names:
            return []
        doubtful = [name for name in of_process(names) if name == FILTERS or self.others_ran]
        repeated = self._repeated(expected, doubtful) if doubtful else ()
        told = [name for name in names if name not in doubtful or name in repeated]
        expected.restore(told)
        for name in doubtful:
            if name not in repeated and name not in CHANGED_ELSEWHERE:
                why = "it was changed once, and not when the compiled region ran again; another thread ran meanwhile"
                self.skip(Skip(f"state[{name}]", why, matters=True))
        return settings_changed(told, before=before, expected=expected, actual=after, during=self.during)

    def _repeated(self, expected: ProcessState, names: Sequence[str]) -> tuple[str, ...]:
        """Which settings the candidate changes when it runs again, from eager's; they are left as they are."""
        with compile_lock:  # no other thread compiles meanwhile, and changes what compiling changes for a while
            now = ProcessState.capture()
            expected.restore(names)
            start = ProcessState.capture()
            try:
                self.again()
            except Exception:  # as it did before, or what this run lacks: the settings say what they say
                pass
            finally:
                changed = start.changed(ProcessState.capture())
                start.restore(changed)
                now.restore(names)
        return changed
