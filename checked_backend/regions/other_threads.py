"""Other threads: did one draw random numbers while a call was checked? Said only on evidence.

Torch's generators are the whole process's, so a thread that draws meanwhile changes what both sides of a check draw.
That a thread is alive shows nothing: a pool's threads wait. A generator that moves while neither side runs shows it,
and so does a state that neither side leaves by itself, where another thread has run meanwhile.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from checked_backend.regions.torch_state import RngState

__all__ = ["Left", "OtherThreads", "evidence_of_others", "moves_by_itself"]

LOOKS = 5
"""How often the generators are looked at, to see whether they move by themselves."""

SECONDS_TO_DRAW = 0.02
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
        return cls(
            {
                thread.native_id: _run_time(thread.native_id)
                for thread in threading.enumerate()
                if thread.ident != here and thread.native_id is not None
            }
        )

    def active_since(self) -> bool:
        """Whether any other thread has run since then, began or ended; True if the system does not tell."""
        now = OtherThreads.now().ran
        if now.keys() != self.ran.keys():
            return True
        return any(not said or self.ran[number] != said for number, said in now.items())


def _run_time(number: int) -> str:
    try:
        return (_TASKS / str(number) / "schedstat").read_text(encoding="ascii").split()[0]
    except (OSError, IndexError):
        return ""


@dataclass(frozen=True, slots=True)
class Left:
    """The random states that both sides of a check left behind.

    Attributes:
        reference: The random state after eager.
        candidate: The random state after the compiled program, which began from the same one.
        others_ran: Whether another thread ran meanwhile.
    """

    reference: RngState
    candidate: RngState
    others_ran: bool


def moves_by_itself(devices: tuple[int, ...]) -> bool:
    """Whether the generators move while this thread does nothing."""
    for _ in range(LOOKS):
        before = RngState.capture(devices)
        time.sleep(SECONDS_TO_DRAW)
        if not RngState.capture(devices).same_as(before):
            return True
    return False


def evidence_of_others(
    left: Left | None, devices: tuple[int, ...], again: Callable[[], tuple[RngState, RngState]]
) -> str | None:
    """Evidence that another thread drew random numbers during a call, in words; None if there is none.

    Args:
        left: The random states that the call left behind, if they are known.
        devices: CUDA devices whose generators count.
        again: Runs both sides again, from the random state before the call, and gives what they leave.
    """
    if moves_by_itself(devices):
        return "torch's random state moves while neither eager nor the compiled program runs"
    if left is None or not left.others_ran:
        return None
    reference, candidate = again()
    if left.reference.same_as(reference) and left.candidate.same_as(candidate):
        return None
    return "it ran during this call, which left a random state that neither eager nor the compiled program leaves alone"
