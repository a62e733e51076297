"""Results that are not ready when a call returns them: threads or streams of the compiled program still write to them.

The comparison comes some time after the call. By then such a result may be right, and the user's next line reads it
before. So what is there at once is held against what is there at the end of the comparison.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from checked_backend.findings import Finding, Kind
from checked_backend.numerics.bits import resolved, same_bits
from checked_backend.numerics.fingerprint import LARGE, fingerprint
from checked_backend.regions.execution import Subjects
from checked_backend.regions.handed_out import memory_range, memory_ranges, overlap

__all__ = ["AtReturn"]


@dataclass(frozen=True, slots=True)
class AtReturn:
    """What results held when a call had just returned them, by index: copies of small ones, checksums of others.

    Memory of inputs is not looked at, also where it is a result: other threads of the user's may write to it.
    """

    held: Mapping[int, torch.Tensor | int | None]

    @classmethod
    def of(cls, returned: Any, args: Sequence[Any]) -> AtReturn:
        """Look at the results.

        Args:
            returned: What the compiled program has just returned.
            args: The call's arguments.
        """
        outputs = returned if isinstance(returned, (tuple, list)) else (returned,)
        taken = memory_ranges(args)
        found = {}
        for index, output in enumerate(outputs):
            memory = memory_range(output)
            if memory is not None and not any(overlap(memory, other) for other in taken):
                found[index] = fingerprint(output) if output.numel() >= LARGE else resolved(output).clone()
        return cls(found)

    def late(self, outputs: Sequence[Any], subjects: Subjects, sources: Sequence[str]) -> list[Finding]:
        """Findings about results that have changed since.

        Args:
            outputs: The results. Nobody else has them yet.
            subjects: Names.
            sources: The user's lines that make them.
        """
        return [
            Finding(
                kind=Kind.MUTATION,
                detail="mutation.late",
                subject=subjects.output(index),
                message=(
                    "the compiled program was still writing to this result when it returned it: a thread or a stream "
                    "of its own was not waited for, and the next line of the program may read what is not there yet"
                ),
                expected="what eager returns is complete",
                actual="it changed after the call",
                source=(sources[index] if index < len(sources) else "") or None,
            )
            for index, held in self.held.items()
            if not _holds(outputs[index], held)
        ]


def _holds(output: torch.Tensor, held: torch.Tensor | int | None) -> bool:
    if isinstance(held, torch.Tensor):
        return same_bits(resolved(output), held)
    return fingerprint(output) == held
