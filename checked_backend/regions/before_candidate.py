"""The state that a check of a region gathers before the candidate runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from checked_backend._torch.autograd import autograd_sequence_number
from checked_backend.findings import Finding
from checked_backend.modes.collective_tape import CollectiveReplayError
from checked_backend.numerics.fingerprint import fingerprints
from checked_backend.regions.budget import Due, Meter
from checked_backend.regions.call import Call
from checked_backend.regions.call_findings import unexpected_mutation
from checked_backend.regions.exchanges import Exchanges
from checked_backend.regions.execution import Execution, Subjects
from checked_backend.regions.gradient_gate import input_edges
from checked_backend.regions.graph_info import GraphInfo
from checked_backend.regions.inputs import Effects, Inputs
from checked_backend.regions.other_threads import OtherThreads
from checked_backend.regions.process_state import ProcessState
from checked_backend.regions.returned_tensors import ReturnedTensors, Snapshot
from checked_backend.regions.surrounding_memory import SurroundingMemory
from checked_backend.regions.torch_state import RngState, TorchState
from checked_backend.regions.write_counts import WriteCounts, uncounted_writes

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
        surroundings: The memory and the gradients beside the inputs.
        writes: How often the inputs had been written to; of AOT autograd's graphs unknown, since their caller counts.
        changed: The settings as the candidate leaves them, if eager runs after it.
    """

    call: Call
    reference: Execution | Exception | None
    fingerprints: Mapping[int, int | None]
    settings: tuple[ProcessState, ProcessState]
    threads: OtherThreads
    after_reference: RngState
    edges: Mapping[Any, int]
    earlier: Snapshot
    since: int
    meter: Meter
    surroundings: SurroundingMemory
    writes: WriteCounts
    changed: ProcessState | None = None

    @classmethod
    def gather(
        cls,
        args: Sequence[Any],
        info: GraphInfo,
        effects: Effects,
        subjects: Subjects,
        random: RngState,
        due: Due,
        meter: Meter,
        earlier: ReturnedTensors,
    ) -> BeforeCandidate:
        """Copy what the check of one call needs. Eager did not run yet.

        Args:
            args: The inputs.
            info: The region's names and source lines.
            effects: Which inputs the region mutates.
            subjects: Names.
            random: The random state before the call.
            due: How the call is checked.
            meter: Measures the time that the check takes.
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
        fingerprints = call.inputs.fingerprints(args)
        threads = OtherThreads.now()
        settings = ProcessState.capture()
        return cls(
            call,
            reference=None,
            fingerprints=fingerprints,
            settings=(settings, settings),
            threads=threads,
            after_reference=random,
            edges=input_edges(args, call.inputs.requires_grad),
            earlier=earlier.look(args),
            since=autograd_sequence_number(),
            meter=meter,
            surroundings=SurroundingMemory.of(args, gradients=not info.accumulates),
            writes=WriteCounts.of(args if info.graph is None else ()),
        )

    def mutations(self, args: Sequence[Any], reference: Execution) -> list[Finding]:
        """Findings about inputs that eager leaves alone, and about writes that eager counts.

        Args:
            args: The inputs, after the call.
            reference: Eager's execution.
        """
        inputs, subjects = self.call.inputs, self.call.subjects
        now = fingerprints([args[place] for place in self.fingerprints])
        changed = [
            place for (place, value), found in zip(self.fingerprints.items(), now, strict=True) if found != value
        ]
        return [
            *unexpected_mutation([subjects.mutated(place) for place in changed]),
            *uncounted_writes(
                {place: subjects.mutated(place) for place in inputs.mutated},
                inputs.pristine,
                (reference.arguments, reference.counted),
                (args, self.writes),
            ),
        ]

    @property
    def not_replayed(self) -> bool:
        """Whether eager raised because a tensor from other ranks was missing."""
        if self.call.exchanges is None or not isinstance(self.reference, Exception):
            return False
        return isinstance(self.reference, CollectiveReplayError) or self.call.exchanges.doubtful
