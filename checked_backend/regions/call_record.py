"""Everything that a check of one call of a region notes, from before the candidate runs until it is answered."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from checked_backend._torch.autograd import autograd_sequence_number
from checked_backend.ranks.exchanges import Exchanges
from checked_backend.ranks.tape import CollectiveReplayError
from checked_backend.regions.budget import Due, Meter
from checked_backend.regions.call import Call
from checked_backend.regions.control_runs import RegionControlRuns
from checked_backend.regions.execution import Execution, Subjects
from checked_backend.regions.gradient_gate import input_edges
from checked_backend.regions.graph_info import GraphInfo
from checked_backend.regions.inputs import Effects, Inputs
from checked_backend.regions.other_threads import FinalRngStates, OtherThreads
from checked_backend.regions.process_state import ProcessState
from checked_backend.regions.returned_tensors import ReturnedTensors
from checked_backend.regions.torch_state import RngState, TorchState

__all__ = ["CallRecord"]


@dataclass(slots=True)
class CallRecord:
    """The record of one checked call.

    Attributes:
        args: The user's inputs.
        info: The region's names and source lines.
        call: The call.
        earlier: What the region returned before.
        threads: The threads that run before the candidate does.
        edges: The places in the user's autograd graph where the gradients of the inputs arrive.
        since: The autograd sequence number.
        meter: Measures the time that the check takes.
        controls: Makes the call's control runs.
        reference: Eager's execution, or its exception; None before it ran, and after it was freed.
        eager_settings: The settings of the process when eager began, and when it was over.
        after_reference: The random state that eager leaves.
        after_candidate: The random state that the candidate leaves.
        settings: The settings of the process as the candidate leaves them, if eager runs after it.
        returned: The candidate's results.
    """

    args: Sequence[Any]
    info: GraphInfo
    call: Call
    earlier: ReturnedTensors
    threads: OtherThreads
    edges: Mapping[Any, int]
    since: int
    meter: Meter
    controls: Callable[[], RegionControlRuns]
    reference: Execution | Exception | None
    eager_settings: tuple[ProcessState, ProcessState] | None
    after_reference: RngState
    after_candidate: RngState
    settings: ProcessState | None = None
    returned: Any = None

    @classmethod
    def begin(
        cls,
        args: Sequence[Any],
        info: GraphInfo,
        effects: Effects,
        subjects: Subjects,
        random: RngState,
        due: Due,
        meter: Meter,
        earlier: ReturnedTensors,
        controls: Callable[[Call], RegionControlRuns],
    ) -> CallRecord:
        """Copy what the check of one call needs. Nothing ran yet.

        Args:
            effects: Which inputs the region mutates.
            random: The random state before the call.
            due: How the call is checked.
        """
        devices = {"cpu", *(arg.device.type for arg in args if isinstance(arg, torch.Tensor))}
        call = Call(
            Inputs.capture(args, effects.mutated, gradients=torch.is_grad_enabled() or info.enables_grad),
            TorchState.capture(sorted(devices)),
            random,
            subjects,
            due=due,
            exchanges=None if info.collectives is None else Exchanges(info.collectives, hands_over=info.hands_over),
            number=earlier.calls,
            meter=meter,
        )
        return cls(
            args,
            info,
            call,
            earlier,
            OtherThreads.now(),
            input_edges(args, call.inputs.requires_grad),
            autograd_sequence_number(),
            meter,
            lambda: controls(call),
            reference=None,
            eager_settings=None,
            after_reference=random,
            after_candidate=random,
        )

    def candidate_ended(self) -> None:
        """Note the settings that the candidate leaves, before eager runs after it."""
        self.settings = ProcessState.capture()

    def final_rng_states(self) -> FinalRngStates:
        """The random states that both sides left."""
        return FinalRngStates(self.after_reference, self.after_candidate, self.threads.active_since())

    @property
    def not_replayed(self) -> bool:
        """Whether eager raised because a tensor from other ranks was missing."""
        if self.call.exchanges is None or not isinstance(self.reference, Exception):
            return False
        return isinstance(self.reference, CollectiveReplayError) or self.call.exchanges.doubtful
