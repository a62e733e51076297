"""The state that a check of a region gathers before the candidate runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from checked_backend.modes.collective_tape import CollectiveReplayError
from checked_backend.regions.beside import Beside
from checked_backend.regions.compare_call import Call
from checked_backend.regions.execution import Execution
from checked_backend.regions.handed_out import Look
from checked_backend.regions.other_threads import OtherThreads
from checked_backend.regions.process_state import ProcessState
from checked_backend.regions.schedule import Meter
from checked_backend.regions.torch_state import RngState

__all__ = ["BeforeCandidate"]


@dataclass(slots=True)
class BeforeCandidate:
    """The state that a check gathers before the candidate runs.

    Attributes:
        call: The call.
        reference: Eager's execution, or its exception; None after it was freed.
        fingerprints: Checksums of the inputs that must stay as they are.
        settings: The settings of the process before the call, and as eager leaves them.
        threads: The threads that run.
        after_reference: The random state that eager leaves.
        edges: The places in the user's autograd graph where the gradients of the inputs arrive.
        earlier: Results of earlier calls that the program holds.
        since: The autograd sequence number.
        meter: Measures the time that the check takes.
        beside: The memory and the gradients beside the inputs.
        changed: The settings as the candidate leaves them, if eager runs after it.
    """

    call: Call
    reference: Execution | Exception | None
    fingerprints: Mapping[int, int | None]
    settings: tuple[ProcessState, ProcessState]
    threads: OtherThreads
    after_reference: RngState
    edges: Mapping[Any, int]
    earlier: Look
    since: int
    meter: Meter
    beside: Beside
    changed: ProcessState | None = None

    @property
    def not_replayed(self) -> bool:
        """Whether eager raised because a tensor from other ranks was missing."""
        if self.call.exchanges is None or not isinstance(self.reference, Exception):
            return False
        return isinstance(self.reference, CollectiveReplayError) or self.call.exchanges.doubtful
