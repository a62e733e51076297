"""Find gradients that a later call's backward pass sends in the memory of gradients that the program still holds.

A compiler may send its gradients in a buffer of its own. When it fills that buffer again, it changes the gradients that
the program holds, and the program accumulates the last gradient several times. Eager's backward pass allocates new
memory, unless it sends on an arriving gradient, an input or a constant.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from checked_backend._torch.tensors import StorageWeakRef, storage_users
from checked_backend.findings import Finding, Kind, Skip
from checked_backend.regions.handed_out import MemoryRange, memory_range, overlap
from checked_backend.report.session import active_sessions

__all__ = ["EarlierGradients", "SentGradient"]

MOST_GRADIENTS = 512
"""The most gradients that are remembered."""


@dataclass(frozen=True, eq=False, slots=True)
class SentGradient:
    """A gradient that a backward pass has sent.

    Attributes:
        gradient: The gradient, as long as somebody holds it.
        storage: The gradient's memory.
        owners: How many other owners the memory had when the gradient was sent.
        memory: The places of its elements in memory.
        region: The region that sent it.
        call: The number of that region's call.
    """

    gradient: weakref.ref[torch.Tensor]
    storage: StorageWeakRef
    owners: int
    memory: MemoryRange
    region: str
    call: int

    @classmethod
    def of(cls, gradient: torch.Tensor, memory: MemoryRange, region: str, call: int) -> SentGradient:
        """Remember a gradient, right when it is sent."""
        storage = StorageWeakRef(gradient.untyped_storage())
        return cls(weakref.ref(gradient), storage, storage_users(storage) - 1, memory, region, call)

    def is_held(self) -> bool:
        """Whether the program still holds it; ``.grad`` holds only its memory."""
        return self.gradient() is not None or storage_users(self.storage) > self.owners

    def is_there(self) -> bool:
        """Whether the memory still exists. Freed memory may hold anything by now."""
        return self.gradient() is not None or storage_users(self.storage) > 0


class _Known:
    """The latest gradients that were sent."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sent: list[SentGradient] = []

    def held(self) -> list[SentGradient]:
        with self._lock:
            self._sent = [sent for sent in self._sent if sent.is_held()]
            return list(self._sent)

    def add(self, sent: Sequence[SentGradient]) -> None:
        with self._lock:
            self._sent = [*self._sent, *sent][-MOST_GRADIENTS:]

    def close(self) -> Iterator[Skip]:
        """End a session. Nothing is compared: no later call can have written to these gradients."""
        return iter(())


class EarlierGradients:
    """The gradients that a region's backward passes, and those of other regions in the active sessions, have sent.

    Args:
        region: The region's name.
    """

    def __init__(self, region: str) -> None:
        self._region = region
        self._own = _Known()

    def held(self) -> tuple[SentGradient, ...]:
        """The gradients that the program holds. Call it before a backward pass can send others in the same memory."""
        return tuple(dict.fromkeys(sent for known in self._known() for sent in known.held()))

    def sent_again(
        self,
        call: int,
        gradients: Mapping[str, torch.Tensor | None],
        reference: Mapping[str, torch.Tensor | None],
        given: Sequence[MemoryRange],
        held: Sequence[SentGradient],
    ) -> list[Finding]:
        """Findings about gradients in the memory of those of an earlier call; the gradients are remembered.

        Args:
            call: The number of the call.
            gradients: The gradients that the candidate sent, by subject.
            reference: Eager's gradients.
            given: Memory that a gradient may be sent in: that of the arriving gradients and of the inputs.
            held: The gradients that the program held when the backward pass began.
        """
        found, new = [], []
        for subject, gradient in gradients.items():
            memory = memory_range(gradient)
            if gradient is None or memory is None or any(overlap(memory, other) for other in given):
                continue
            new.append(SentGradient.of(gradient, memory, self._region, call))
            eager = memory_range(reference.get(subject))
            found += [
                _finding(sent, subject, self._region, call)
                for sent in held
                if (sent.region, sent.call) != (self._region, call)
                and overlap(memory, sent.memory)
                and not (eager is not None and overlap(eager, sent.memory))
                and sent.is_there()
            ][:1]
        for known in self._known():
            known.add(new)
        return found

    def _known(self) -> list[_Known]:
        return [self._own, *(session.part(_Known) for session in active_sessions())]


def _finding(sent: SentGradient, subject: str, region: str, call: int) -> Finding:
    whose = "this region" if sent.region == region else f"region {sent.region}"
    return Finding(
        kind=Kind.ALIAS,
        detail="alias.overwritten",
        subject=subject,
        message=(
            f"the compiled backward pass of call {call} sent it in the memory of a gradient that call {sent.call} of "
            f"{whose} sent, and that the program still holds; so that one is overwritten, and where gradients are "
            "accumulated, the last one counts more than once. Eager makes a new one"
        ),
        expected="memory of its own",
        actual=f"memory of a gradient of call {sent.call}",
    )
