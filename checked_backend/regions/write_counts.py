"""Whether writes to inputs are counted.

Autograd saves values for the backward pass, and raises there if one was written to since. It learns that from a count
of the writes to a tensor, its version. A compiler that writes through raw memory must count by itself, else the
backward pass goes on with overwritten values, and gradients are silently wrong.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from checked_backend._torch.tensors import version_of
from checked_backend.findings import Finding, Kind
from checked_backend.numerics.fingerprint import fingerprint
from checked_backend.regions.inputs import storage_key

__all__ = ["WriteCounts", "uncounted_writes"]


@dataclass(frozen=True, slots=True)
class WriteCounts:
    """How often each plain tensor among inputs had been written to at one moment, by position."""

    counts: Mapping[int, int]

    @classmethod
    def of(cls, args: Sequence[Any]) -> WriteCounts:
        """Read the counts. A tensor of inference mode has none."""
        plain = {place: arg for place, arg in enumerate(args) if type(arg) in (torch.Tensor, torch.nn.Parameter)}
        return cls({place: version_of(arg) for place, arg in plain.items() if not arg.is_inference()})

    def advanced(self, args: Sequence[Any]) -> frozenset[int]:
        """The positions of the same inputs to which counted writes have been made since."""
        return frozenset(place for place, count in self.counts.items() if version_of(args[place]) != count)


def uncounted_writes(
    subjects: Mapping[int, str],
    pristine: Mapping[int, torch.Tensor],
    reference: tuple[Sequence[Any], frozenset[int]],
    candidate: tuple[Sequence[Any], WriteCounts],
) -> list[Finding]:
    """Findings about inputs that both change, where eager's writes are counted and the candidate's are not.

    How often each counts is its own affair. Tensors in one memory may have a count together, so one of them is enough.

    Args:
        subjects: The names of the mutated inputs, by position.
        pristine: The values of mutated inputs before the call, by position.
        reference: Eager's arguments after the call, and the positions of those to which it counted writes.
        candidate: The user's inputs after the call, and their counts before it.
    """
    (eagers, counted), (args, before) = reference, candidate
    told = {storage_key(args[place]) for place in before.advanced(args)}
    return [
        _uncounted(subjects[place])
        for place in sorted(counted & before.counts.keys() & pristine.keys() & subjects.keys())
        if storage_key(args[place]) not in told and _both_changed(pristine[place], eagers[place], args[place])
    ]


def _both_changed(before: torch.Tensor, *after: torch.Tensor) -> bool:
    """Whether both wrote something else there: a write that the candidate leaves out shows in the values."""
    known = fingerprint(before)
    return all(fingerprint(tensor) != known for tensor in after)


def _uncounted(subject: str) -> Finding:
    return Finding(
        kind=Kind.MUTATION,
        detail="mutation.uncounted",
        subject=subject,
        message=(
            "the compiled program wrote to this input without counting the write in its version, as eager does: a "
            "backward pass for which the old values were saved takes the new ones and does not raise; call "
            "torch.autograd.graph.increment_version for what is written to through raw memory"
        ),
        expected="a version that the call has raised",
        actual="the version before the call",
    )
