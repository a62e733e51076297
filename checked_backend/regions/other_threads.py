"""Torch's random states that both sides of a check leave, and whether another thread drew from the same generators.

The generators are the whole process's, so a thread that draws meanwhile makes the same difference. That a thread is
alive shows nothing: a pool's threads wait. So a thread is named on evidence only.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from checked_backend.regions.torch_state import RngState

__all__ = ["FinalRngStates", "OtherThreads"]

SECONDS_TO_DRAW = 0.1
"""Seconds in which a thread that draws random numbers all the time will have drawn some."""

_TASKS = Path("/proc/self/task")


@dataclass(frozen=True, slots=True)
class OtherThreads:
    """How long each other thread of this process has run, at one moment.

    Attributes:
        ran: The operating system's text for each thread's run time, by the thread's number; "" if it tells none.
    """

    ran: Mapping[int, str]

    @classmethod
    def now(cls) -> OtherThreads:
        """Look at the threads that Python knows, other than this one."""
        here = threading.get_ident()
        numbers = [thread.native_id for thread in threading.enumerate() if thread.ident != here]
        return cls({number: _run_time(number) for number in numbers if number is not None})

    def active_since(self) -> bool:
        """Whether any other thread has run since then, began or ended; True if the system does not tell."""
        now = OtherThreads.now().ran
        return now != self.ran or "" in now.values()


def _run_time(number: int) -> str:
    try:
        return (_TASKS / str(number) / "schedstat").read_text(encoding="ascii").split()[0]
    except (OSError, IndexError):
        return ""


@dataclass(frozen=True, slots=True)
class FinalRngStates:
    """The random states that both sides of a check left.

    Attributes:
        reference: The random state after eager.
        candidate: The random state after the compiled program, which began from the same one.
        others_ran: Whether another thread ran meanwhile.
    """

    reference: RngState
    candidate: RngState
    others_ran: bool

    def others_drew(self, run_both: Callable[[], tuple[RngState, RngState]]) -> str | None:
        """Evidence that another thread drew random numbers during the call, in words; None if there is none.

        Args:
            run_both: Runs both sides once more, from the state before the call, and gives what they leave.
        """
        devices = tuple(self.reference.cuda)
        before = RngState.capture(devices)
        time.sleep(SECONDS_TO_DRAW)
        if not RngState.capture(devices).same_as(before):
            return "torch's random state moves while neither eager nor the compiled program runs"
        if not self.others_ran:
            return None
        reference, candidate = run_both()
        if self.reference.same_as(reference) and self.candidate.same_as(candidate):
            return None
        return "it ran during this call, which left a random state that neither side leaves alone"
