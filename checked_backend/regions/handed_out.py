"""Results of earlier calls that the program still holds: does a later call write to them?

A compiler that hands out a buffer and writes to it again changes what the user holds. The user may change it too, and
in ways that torch counts nowhere (``.data``, NumPy), so a result that changed is no evidence by itself. Results are
looked at right before and right after the compiled program runs. If a result changes in between, and is no input, the
compiled program changed it. Results of two calls in the same memory are evidence by themselves, if eager makes new
ones.

Results are known by weak references only. A program that holds ``loss.detach()``, a row, or an array of NumPy holds no
longer the tensor that it got, but its memory: that memory then has more owners than when it was handed out.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from checked_backend._torch.collectives import collectives_issued
from checked_backend._torch.inductor import cuda_graph_results
from checked_backend._torch.modes import disable_current_modes
from checked_backend._torch.tensors import (
    StorageWeakRef,
    inner_tensors,
    is_functorch_wrapped_tensor,
    storage_again,
    storage_users,
    version_of,
)
from checked_backend.findings import Finding, Kind, Skip
from checked_backend.numerics.fingerprint import fingerprints

__all__ = [
    "HandedOut",
    "Look",
    "MemoryRange",
    "Result",
    "in_cuda_graph",
    "memory_range",
    "memory_ranges",
    "overlap",
    "results_of",
]

MOST_RESULTS = 64
"""The most results that are remembered."""

MOST_BYTES = 2**28
"""The most bytes of results that are remembered."""


@dataclass(eq=False, slots=True)
class Result:
    """One result of an earlier call.

    Attributes:
        tensor: The result, as long as the program holds it.
        subject: Its name for people.
        region: The region whose result it is.
        call: The number of the call of that region.
        source: The user's line that made it.
        size: Its bytes.
        print: The checksum when the result was last looked at.
        version: The number of writes to the result that torch had counted then.
        memory: The result's memory.
        owners: How many other owners the memory had when the compiled program handed the result out.
        dtype: The result's dtype. It is kept with the place in memory, for `torch.Tensor.set_`.
        place: Offset, size and strides.
        issued: How many collectives the program had begun when the result was handed out.
    """

    tensor: weakref.ref[torch.Tensor]
    subject: str
    region: str
    call: int
    source: str
    size: int
    print: int | None
    version: int
    memory: StorageWeakRef
    owners: int
    dtype: torch.dtype
    place: tuple[int, torch.Size, tuple[int, ...]]
    issued: int

    def held(self) -> torch.Tensor | None:
        """The result, if the program still holds it; its memory as a tensor, if the program only holds that."""
        if (tensor := self.tensor()) is not None:
            return tensor
        if storage_users(self.memory) <= self.owners or (storage := storage_again(self.memory)) is None:
            return None
        with torch.no_grad(), disable_current_modes():
            return torch.empty(0, dtype=self.dtype, device=storage.device).set_(storage, *self.place)

    def uncounted(self, held: torch.Tensor) -> bool:
        """Whether torch has counted no write to it since. The count is only known for the result itself."""
        return held is self.tensor() and version_of(held) == self.version


class HandedOut:
    """The latest results of checked calls.

    Attributes:
        unchecked: Whether compiled code has run unchecked since they were looked at.
    """

    def __init__(self) -> None:
        self.unchecked = False
        self._lock = threading.Lock()
        self._results: list[Result] = []

    def add(self, results: Iterable[Result]) -> None:
        """Remember results. The oldest ones, and those that nobody holds, are forgotten."""
        with self._lock:
            known = [result for result in (*self._results, *results) if result.held() is not None][-MOST_RESULTS:]
            total = 0
            for place in range(len(known) - 1, -1, -1):
                total += known[place].size
                if total > MOST_BYTES:
                    known = known[place + 1 :]
                    break
            self._results = known

    def forget(self, results: Iterable[Result]) -> None:
        """Forget results that have findings."""
        gone = {id(result) for result in results}
        with self._lock:
            self._results = [result for result in self._results if id(result) not in gone]

    def close(self) -> Iterator[Skip]:
        """Look at the results a last time. Those that changed while calls ran unchecked could not be checked."""
        for subject, reason in Look((self,)).unexplained.items():
            yield Skip(subject, reason, matters=True)

    def held(self) -> tuple[Result, ...]:
        """The results that the program still holds."""
        with self._lock:
            return tuple(result for result in self._results if result.held() is not None)


def results_of(
    outputs: Sequence[Any], subjects: Sequence[str], sources: Sequence[str], args: Sequence[Any], region: str, call: int
) -> list[Result]:
    """The results of a call to remember: plain ones in memory of their own, not in that of an input or a CUDA graph."""
    taken, issued = memory_ranges(args), collectives_issued()
    own: dict[int, MemoryRange] = {}
    for index, output in enumerate(outputs):
        memory = memory_range(output)
        if memory is None or any(overlap(memory, other) for other in taken):
            continue
        if not in_cuda_graph(output):
            own[index] = memory
    found = []
    for (index, memory), checksum in zip(own.items(), fingerprints([outputs[index] for index in own]), strict=True):
        output = outputs[index]
        source = sources[index] if index < len(sources) else ""
        size = memory[1] - memory[0]
        known = weakref.ref(output), subjects[index], region, call, source, size
        storage = StorageWeakRef(output.untyped_storage())
        place = output.storage_offset(), output.size(), output.stride()
        seen = checksum, version_of(output)
        found.append(Result(*known, *seen, storage, storage_users(storage) - 1, output.dtype, place, issued))
    return found


def in_cuda_graph(output: Any) -> bool:
    """Whether a result lies in the memory of a CUDA graph of Inductor's, which torch guards itself."""
    memory = memory_range(output)
    return memory is not None and memory[0] in cuda_graph_results(output.device)


class Look:
    """The state of the results of earlier calls at one moment.

    Args:
        holders: The objects that remember them.
        args: The call's arguments, to which it may write.

    Attributes:
        unexplained: Why it is unknown who changed a result, by subject. Asked `overwritten`, it has more.
    """

    def __init__(self, holders: Sequence[HandedOut], args: Sequence[Any] = ()) -> None:
        self.unexplained: dict[str, str] = {}
        self._holders = holders
        self._taken = memory_ranges(args)
        self._issued = collectives_issued()
        self._results: dict[int, Result] = {}
        known = dict.fromkeys(result for holder in holders for result in holder.held())
        free = [(result, held) for result in known if (held := result.held()) is not None and not self._is_taken(held)]
        for (result, held), now in zip(free, fingerprints([held for _, held in free]), strict=True):
            unchecked = any(holder.unchecked for holder in holders)
            if unchecked and now != result.print and result.uncounted(held) and result.issued == self._issued:
                self.unexplained[result.subject] = (
                    f"it changed after call {result.call}, while calls ran unchecked, and torch counted no write to it"
                )
            result.print, result.version = now, version_of(held)
            self._results[id(result)] = result
        for holder in holders:
            holder.unchecked = False

    def _is_taken(self, held: torch.Tensor) -> bool:
        memory = memory_range(held)
        return memory is None or any(overlap(memory, other) for other in self._taken)

    def overwritten(
        self,
        call: int,
        region: str,
        outputs: Sequence[Any] = (),
        reference: Sequence[Any] = (),
        *,
        counted: bool = True,
    ) -> list[Finding]:
        """Findings about results that have changed, or in whose memory another result lies.

        Args:
            call: The call that ran in between, to which these findings belong.
            reference: Eager's outputs.
            counted: Whether writes that torch counts are the call's. In a backward pass the user's program runs too.
        """
        found: list[tuple[Result, Finding]] = []
        known = [(result, held) for result in self._results.values() if (held := result.held()) is not None]
        for (result, held), now in zip(known, fingerprints([held for _, held in known]), strict=True):
            changed = now != result.print and (counted or result.uncounted(held))
            shares = self._shares(held, outputs, reference)
            if changed and not shares and result.issued != self._issued:
                self.unexplained[result.subject] = (
                    f"it changed while call {call} of {region} ran; a collective of the program's may have written to "
                    "it, which torch does not count"
                )
            elif changed or shares:
                found.append((result, _finding(result, call, region, changed=changed)))
        for holder in self._holders:
            holder.forget(result for result, _ in found)
        return [finding for _, finding in found]

    @staticmethod
    def _shares(held: torch.Tensor, outputs: Sequence[Any], reference: Sequence[Any]) -> bool:
        memory = memory_range(held)
        for index, output in enumerate(outputs):
            other = memory_range(output)
            if memory is None or other is None or not overlap(memory, other):
                continue
            eager = memory_range(reference[index]) if index < len(reference) else None
            if eager is not None and not overlap(memory, eager):
                return True
        return False


def _finding(result: Result, call: int, region: str, *, changed: bool) -> Finding:
    whose = "this region" if result.region == region else f"region {result.region}"
    how = (
        f"the compiled program's call {call} wrote to it"
        if changed
        else f"call {call} returned a result in the same memory, so that writing to one changes the other"
    )
    return Finding(
        kind=Kind.ALIAS,
        detail="alias.overwritten",
        subject=result.subject,
        message=(
            f"call {result.call} of {whose} returned it, the program still holds it, and {how}; eager makes a new one"
        ),
        expected=f"memory of its own, unchanged since call {result.call}",
        actual="changed" if changed else f"memory that call {call} returned again",
        source=result.source or None,
    )


MemoryRange: TypeAlias = tuple[int, int]
"""Where memory begins, and the first address behind it."""


def memory_ranges(values: Iterable[Any]) -> list[MemoryRange]:
    """Where the plain tensors among values lie."""
    return [memory for value in values if (memory := memory_range(value)) is not None]


def overlap(one: MemoryRange, other: MemoryRange) -> bool:
    """Whether two ranges share an address."""
    return one[0] < other[1] and other[0] < one[1]


def memory_range(value: Any) -> MemoryRange | None:
    """The range of memory in which a tensor's elements lie; None if the value is no plain tensor with memory."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or inner_tensors(value):
        return None
    if value.is_meta or value.is_quantized or value.numel() == 0 or is_functorch_wrapped_tensor(value):
        return None
    try:
        begin = value.data_ptr()
    except RuntimeError:  # no memory, or a graph's pool took it back
        return None
    reach = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    return (begin, begin + (reach + 1) * value.element_size()) if begin else None
