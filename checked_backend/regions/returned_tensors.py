"""Results and gradients of earlier calls that the program still holds: does a later call write to them?

A compiler that hands out a buffer and writes to it again changes what the user holds. The user may change it too, and
in ways that torch counts nowhere (``.data``, NumPy), so a result that changed is no evidence by itself. Results are
looked at right before and right after the compiled program runs. If a result changes in between, and is no input, the
compiled program changed it. Tensors of two calls in the same memory are evidence by themselves, if eager makes new
ones. Of gradients only that is asked: autograd itself adds to them. Eager sends them in new memory, unless it sends on
an arriving gradient, an input or a constant.

They are known by weak references only. A program that holds ``loss.detach()``, a row, or an array of NumPy holds no
longer the tensor that it got, but its memory, as ``.grad`` does: that memory then has more owners than when it was
handed out.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
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
from checked_backend.regions.execution import Subjects, results_of
from checked_backend.regions.graph_info import GraphInfo
from checked_backend.regions.reporter import RegionReporter
from checked_backend.report.session import active_sessions
from checked_backend.scripts.values import span

MemoryRange: TypeAlias = tuple[int, int]
"""Where memory begins, and the first address behind it."""

MOST_RESULTS, MOST_BYTES = 64, 2**28
"""So many results are remembered at most, together of so many bytes: their values are looked at."""

MOST_GRADIENTS = 512
"""So many gradients are remembered at most."""


class Returned:
    """A result of an earlier call, or a gradient that its backward pass sent.

    Attributes:
        memory: Where its elements lie.
        checksum: That of the values when it was last looked at; None of gradients, which are not looked at.
        version: The number of writes to it that torch had counted then.
        issued: How many collectives the program had begun when it was returned.
        reported: Whether it has a finding. It is not looked at any more.
    """

    def __init__(
        self,
        tensor: torch.Tensor,
        memory: MemoryRange,
        subject: str,
        region: str,
        call: int,
        *,
        source: str = "",
        is_gradient: bool = False,
    ) -> None:
        """Remember a tensor, right when it is returned."""
        self.memory, self.subject, self.region, self.call = memory, subject, region, call
        self.source, self.is_gradient = source, is_gradient
        self.version, self.issued = version_of(tensor), collectives_issued()
        self.checksum: int | None = None
        self.reported = False
        self._tensor, self._storage = weakref.ref(tensor), StorageWeakRef(tensor.untyped_storage())
        self._other_owners = storage_users(self._storage) - 1
        self._dtype, self._layout = tensor.dtype, (tensor.storage_offset(), tensor.size(), tensor.stride())

    def is_held(self) -> bool:
        """Whether the program still holds it, or its memory."""
        return self._tensor() is not None or storage_users(self._storage) > self._other_owners

    def held(self) -> torch.Tensor | None:
        """The tensor, if the program still holds it; its memory as a tensor, if the program only holds that."""
        if (tensor := self._tensor()) is not None:
            return tensor
        if not self.is_held() or (storage := storage_again(self._storage)) is None:
            return None
        with torch.no_grad(), disable_current_modes():
            return torch.empty(0, dtype=self._dtype, device=storage.device).set_(storage, *self._layout)

    def is_there(self) -> bool:
        """Whether the memory still exists. Freed memory may hold anything by now."""
        return self._tensor() is not None or storage_users(self._storage) > 0

    def uncounted(self, held: torch.Tensor) -> bool:
        """Whether torch has counted no write to it since. The count is only known for the tensor itself."""
        return held is self._tensor() and version_of(held) == self.version

    def returned_by(self, region: str) -> str:
        """``call 1 of this region``, for a finding of a region."""
        return f"call {self.call} of {'this region' if region == self.region else f'region {self.region}'}"


class Results:
    """The latest results and gradients that checked calls returned: of one region, or of a session.

    Attributes:
        unchecked: Whether compiled code has run unchecked since the results were looked at.
    """

    def __init__(self) -> None:
        self.unchecked = False
        self._lock = threading.Lock()
        self._known: list[Returned] = []

    def add(self, returned: Iterable[Returned]) -> None:
        """Remember more. The oldest ones, and those that nobody holds, are forgotten."""
        with self._lock:
            known = [one for one in (*self._known, *returned) if one.is_held() and not one.reported]
            results = [one for one in known if not one.is_gradient][-MOST_RESULTS:]
            sizes = accumulate(one.memory[1] - one.memory[0] for one in reversed(results))
            results = results[len(results) - sum(size <= MOST_BYTES for size in sizes) :]
            self._known = [*results, *[one for one in known if one.is_gradient][-MOST_GRADIENTS:]]

    def held(self) -> list[Returned]:
        """Those that the program still holds."""
        return [one for one in self._known if one.is_held() and not one.reported]

    def close(self) -> Sequence[Skip]:
        """Look at them a last time. Those that changed while calls ran unchecked could not be checked."""
        skips: list[Skip] = []
        Snapshot((self,), (), skips.append)
        return skips


class Snapshot:
    """What the program holds of earlier calls at one moment.

    Args:
        args: The call's arguments, to which it may write.
        skip: Receives results of which it is unknown who changed them.
    """

    def __init__(self, holders: Sequence[Results], args: Sequence[Any], skip: Callable[[Skip], None]) -> None:
        self._skip = skip
        self._issued = collectives_issued()
        self._results: list[Returned] = []
        unchecked = any(holder.unchecked for holder in holders)
        taken = memory_ranges(args)
        known = dict.fromkeys(one for holder in holders for one in holder.held())
        self.gradients = [one for one in known if one.is_gradient]
        results = (one for one in known if not one.is_gradient)
        apart = (one for one in results if (memory := memory_range(one.held())) and not _meets(memory, *taken))
        for result, held, now in _with_checksums(apart):
            if unchecked and now != result.checksum and result.uncounted(held) and result.issued == self._issued:
                what = "while calls ran unchecked, and torch counted no write to it"
                skip(Skip(result.subject, f"it changed after call {result.call}, {what}", matters=True))
            result.checksum, result.version = now, version_of(held)
            self._results.append(result)
        for holder in holders:
            holder.unchecked = False

    def overwritten(
        self,
        call: int,
        region: str,
        outputs: Sequence[Any] = (),
        reference: Sequence[Any] = (),
        *,
        counted: bool = True,
    ) -> list[Finding]:
        """Findings about results that have changed, or in whose memory another result lies, but not eager's.

        Args:
            call: The call that ran in between, to which these findings belong.
            counted: Whether writes that torch counts are the call's. In a backward pass the user's program runs too.
        """
        found = []
        sides = [(memory_range(one), memory_range(other)) for one, other in zip(outputs, reference, strict=False)]
        for result, held, now in _with_checksums(self._results):
            memory = memory_range(held)
            changed = now != result.checksum and (counted or result.uncounted(held))
            shares = any(eager and _meets(memory, given) and not _meets(memory, eager) for given, eager in sides)
            counted_elsewhere = threading.active_count() > 1 and not result.uncounted(held)
            if changed and not shares and (counted_elsewhere or result.issued != self._issued):
                what = "another thread of the program's may have written to it"
                if not counted_elsewhere:
                    what = "a collective of the program's may have written to it, which torch does not count"
                why = f"it changed while a later call of {region} ran; {what}"
                self._skip(Skip(result.subject, why, matters=True))
            elif changed or shares:
                how = f"call {call} returned a result in the same memory, so that writing to one changes the other"
                actual = f"memory that call {call} returned again"
                if changed:
                    how, actual = f"the compiled program's call {call} wrote to it", "changed"
                message = (
                    f"{result.returned_by(region)} returned it, the program still holds it, and {how}; eager makes a "
                    "new one"
                )
                expected = f"memory of its own, unchanged since call {result.call}"
                found.append(_overwritten(result.subject, message, expected, actual, result.source))
                result.reported = True
        return found


def _with_checksums(results: Iterable[Returned]) -> Iterator[tuple[Returned, torch.Tensor, int | None]]:
    """The results that are held, with their values and their checksums now."""
    known = [(result, held) for result in results if (held := result.held()) is not None]
    for (result, held), now in zip(known, fingerprints([held for _, held in known]), strict=True):
        yield result, held, now


class ReturnedTensors:
    """The results and gradients that one region returned, to see whether a later call of any region writes to them.

    They are remembered in the region's own memory, and in that of the active sessions.
    """

    def __init__(self, info: GraphInfo, reporter: RegionReporter) -> None:
        self.calls = 0
        self.region = info.name
        self._info = info
        self._reporter = reporter
        self._own = Results()

    def holders(self) -> list[Results]:
        """Where they are remembered."""
        return [self._own, *(session.part(Results) for session in active_sessions())]

    def unchecked(self) -> None:
        """Note that compiled code is about to run unchecked."""
        for holder in self.holders():
            holder.unchecked = True

    def look(self, args: Sequence[Any] = ()) -> Snapshot:
        """Look at all that the program holds, before a call, which may write to its arguments, or a backward pass."""
        return Snapshot(self.holders(), args, self._reporter.skip)

    def remember(self, args: Sequence[Any], subjects: Subjects, returned: Sequence[Any]) -> None:
        """Remember the results of the latest call: plain ones in memory of their own, not in that of a CUDA graph.

        Such a graph writes to it each time it is replayed, and torch itself raises where a program reads it later.
        """
        given = memory_ranges(args)
        results = [
            Returned(output, memory, subjects.result(result), self.region, self.calls, source=self._info.source(result))
            for result, output in results_of(returned, {}).items()
            if (memory := memory_range(output)) is not None
            and not _meets(memory, *given)
            and memory[0] not in cuda_graph_results(output.device)
        ]
        for result, _, now in _with_checksums(results):
            result.checksum = now
        for holder in self.holders():
            holder.add(results)

    def sent(
        self,
        call: int,
        gradients: Mapping[str, torch.Tensor | None],
        reference: Mapping[str, torch.Tensor | None],
        given: Sequence[MemoryRange],
        before: Snapshot,
    ) -> list[Finding]:
        """Remember gradients, and give findings about those in the memory of an earlier call's.

        Args:
            gradients: The gradients that the candidate sent, by subject.
            given: Memory that a gradient may be sent in: that of the arriving gradients and of the inputs.
            before: What the program held when the backward pass began.
        """
        findings, new = [], []
        earlier = [one for one in before.gradients if (one.region, one.call) != (self.region, call)]
        for subject, gradient in gradients.items():
            memory = memory_range(gradient)
            if gradient is None or memory is None or _meets(memory, *given):
                continue
            new.append(Returned(gradient, memory, subject, self.region, call, is_gradient=True))
            eager = memory_range(reference.get(subject))
            shared = (one for one in earlier if one.is_there() and _meets(one.memory, memory))
            first = next((one for one in shared if not _meets(one.memory, eager)), None)
            if first is not None:
                message = (
                    f"the compiled backward pass of call {call} sent it in the memory of a gradient that "
                    f"{first.returned_by(self.region)} sent, and that the program still holds; so that one is "
                    "overwritten, and where gradients are accumulated, the last one counts more than once. Eager "
                    "makes a new one"
                )
                actual = f"memory of a gradient of call {first.call}"
                findings.append(_overwritten(subject, message, "memory of its own", actual))
        for holder in self.holders():
            holder.add(new)
        return findings


def _overwritten(subject: str, message: str, expected: str, actual: str, source: str = "") -> Finding:
    detail = "alias.overwritten"
    return Finding(Kind.ALIAS, subject, message, detail, expected=expected, actual=actual, source=source or None)


def memory_ranges(values: Iterable[Any]) -> list[MemoryRange]:
    """Where the plain tensors among values lie."""
    return [memory for value in values if (memory := memory_range(value)) is not None]


def _meets(memory: MemoryRange | None, *others: MemoryRange | None) -> bool:
    """Whether a range shares an address with one of the others."""
    return memory is not None and any(other and memory[0] < other[1] and other[0] < memory[1] for other in others)


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
    return (begin, begin + span(value) * value.element_size()) if begin else None
