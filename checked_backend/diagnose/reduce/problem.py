"""The problem that passes work on: they propose programs, only `Problem.consider` accepts."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import fx

from checked_backend.diagnose.oracle import Oracle, verdict_oracle
from checked_backend.diagnose.reduce.failing_case import FailingCase, call_nodes
from checked_backend.diagnose.reduce.races import has_race
from checked_backend.findings import Kind
from checked_backend.graphs.nodes import outputs_of
from checked_backend.numerics.bits import with_memory
from checked_backend.numerics.fingerprint import fingerprint
from checked_backend.scripts.values import form_of

_T = TypeVar("_T")

MIN_TIMEOUT_S = 20.0
TIMEOUT_FACTOR = 8.0
"""A candidate counts as hung after this many times the time of the original program."""


_DTYPES = (torch.float32, torch.int64, torch.bool, torch.float64, torch.bfloat16, torch.float16, torch.int32)
_UNUSUAL = {dtype: place for place, dtype in enumerate(_DTYPES)}


class OutOfTime(Exception):
    """Raised when the deadline has passed."""


class Size(NamedTuple):
    """Smaller is simpler; compared from the first field to the last.

    Attributes:
        elements: Elements of all inputs, and of tensors that the graph makes without inputs.
        dimensions: Dimensions of all inputs.
        nodes: Nodes of the graph, those that only take one of several results included.
        dtypes: How unusual the dtypes are.
        layouts: Inputs that are not contiguous.
        values: How unusual the values are.
        arguments: How unusual the numbers in calls are.
    """

    calls: int
    outputs: int
    dynamic: int
    inputs: int
    elements: int
    dimensions: int
    nodes: int
    dtypes: int
    layouts: int
    values: int
    arguments: int

    @property
    def structure(self) -> tuple[int, ...]:
        """The fields about how large the program is, without those about how plain it is."""
        return self[:5]

    def __str__(self) -> str:
        parts = (self.calls, "call"), (self.inputs, "input"), (self.elements, "element")
        calls, inputs, elements = (f"{count} {word}{'' if count == 1 else 's'}" for count, word in parts)
        return f"{calls} on {inputs} of {elements}"


def measure_size(program: FailingCase) -> Size:
    """The size of a program."""
    graph = program.case.graph.graph
    calls = call_nodes(graph)
    constants = [constant for node in calls for constant in constants_of(node)]
    tensors = [value for value in program.case.inputs if isinstance(value, torch.Tensor)]
    dtypes = [*(tensor.dtype for tensor in tensors), *(one for one in constants if isinstance(one, torch.dtype))]
    return Size(
        calls=len(calls),
        outputs=len(outputs_of(graph)),
        dynamic=int(program.case.dynamic),
        inputs=len(program.case.inputs),
        elements=sum(tensor.numel() for tensor in tensors) + sum(map(_made, calls)),
        dimensions=sum(tensor.dim() for tensor in tensors),
        nodes=len(graph.nodes),
        dtypes=sum(_UNUSUAL.get(dtype, len(_UNUSUAL)) for dtype in dtypes),
        layouts=sum(not tensor.is_contiguous() or tensor.storage_offset() != 0 for tensor in tensors),
        values=sum(form_of(tensor).rank for tensor in tensors),
        arguments=sum(1 if constant in (0, None) else 1 + len(str(constant)) for constant in constants),
    )


def _identity(program: FailingCase) -> Hashable:
    """Everything that decides what a program does, apart from its compiler."""
    values = [
        (value.dtype, value.device, value.shape, value.stride(), fingerprint(with_memory(value.detach())))
        if isinstance(value, torch.Tensor)
        else repr(value)
        for value in program.case.inputs
    ]
    return (program.case.graph.code, program.subject, program.case.dynamic, *values)


def constants_of(node: fx.Node) -> list[Any]:
    """The values that are written into a call."""
    found: list[Any] = []
    fx.node.map_aggregate((node.args, dict(node.kwargs)), found.append)
    return [leaf for leaf in found if not isinstance(leaf, fx.Node)]


def _made(node: fx.Node) -> int:
    """Elements that a call makes without inputs, as ``full`` and ``arange`` do."""
    if node.all_input_nodes or not node.args:
        return 0
    sizes = node.args[0] if isinstance(node.args[0], (list, tuple)) else node.args[:1]
    return math.prod(size for size in sizes if type(size) is int)


@dataclass(slots=True, eq=False)
class Problem:
    """The smallest program so far that goes wrong in the same way.

    Attributes:
        deadline: A `time.monotonic` moment after which nothing is tried.
        progress: Called before each program that is tried, with a line for people.
        shown: Whether the first program showed the finding in a worker process. If not, nothing is reduced.
        stopped: Why reducing ended: ``done``, ``deadline`` or ``interrupted`` (Ctrl-C).
    """

    best: FailingCase
    kind: Kind
    deadline: float
    progress: Callable[[str], None] = lambda _line: None
    oracle: Oracle = verdict_oracle
    shown: bool = False
    stopped: Literal["done", "deadline", "interrupted"] = "done"
    tried: int = 0
    step: str = "start"
    size: Size = field(init=False)
    _signs: set[tuple[str, str]] = field(default_factory=set)
    _rejected: set[Hashable] = field(default_factory=set)
    _timeout: float = 10 * MIN_TIMEOUT_S
    _races: bool = field(init=False)

    def __post_init__(self) -> None:
        self.size, self._races = measure_size(self.best), has_race(self.best)

    def _timeout_left(self) -> float:
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise OutOfTime
        return min(self._timeout, left)

    def is_interesting(self, program: FailingCase) -> bool:
        """Whether a program goes wrong as wanted, checked anew.

        Raises:
            OutOfTime: The deadline has passed, or passed while it was checked.
        """
        timeout = self._timeout_left()
        self.progress(f"{self.size}, {self.tried} tried, {self.step}")
        self.tried += 1
        began = time.monotonic()
        found = self.oracle(program.case, timeout) or ()
        self._timeout_left()
        alike = [item for item in found if (item.kind, item.subject) == (self.kind, program.subject)]
        raised = self.kind in (Kind.CRASH, Kind.EXCEPTION)  # the exception must stay, too
        signs = {(item.detail, f"{item.expected} {item.actual}" if raised else "") for item in alike}
        if not self._signs:
            self._signs = signs
        wrong = bool(signs & self._signs)
        if self.tried == 1:
            self._timeout = max(MIN_TIMEOUT_S, TIMEOUT_FACTOR * (time.monotonic() - began))
        return wrong

    def consider(self, candidate: FailingCase | None) -> bool:
        """Accept a program, if there is one, if it is smaller than the best and still goes wrong in the same way.

        A program with an undefined result is not accepted, unless the original program has one.
        """
        if candidate is None or not (size := measure_size(candidate)) < self.size:
            return False
        if not self._races and has_race(candidate):
            return False
        identity = _identity(candidate)
        if identity in self._rejected:
            return False
        if not self.is_interesting(candidate):
            self._rejected.add(identity)
            return False
        self.best, self.size = candidate, size
        return True

    def wrong_results(self, program: FailingCase) -> list[int]:
        """The outputs of a program that go wrong in the wanted kind."""
        found = self.oracle(program.case, self._timeout_left()) or ()
        subjects = {item.subject for item in found if item.kind == self.kind}
        count = len(outputs_of(program.case.graph.graph))
        return [place for place in range(count) if f"output[{place}]" in subjects]

    def all_or_each(self, items: Callable[[], Sequence[_T]], changed: Callable[[Sequence[_T]], FailingCase]) -> None:
        """Accept a program in which all items that there are now are changed, else programs in which each is."""
        found = items()
        if len(found) > 1 and self.consider(changed(found)):
            return
        for one in found:
            if one in items():
                self.consider(changed([one]))

    def drop_runs(self, items: Callable[[], Sequence[_T]], without: Callable[[Sequence[_T]], FailingCase]) -> None:
        """Accept programs without ever shorter runs of the items that there are now."""
        size = max(1, len(items()) // 2)
        while size:
            place = 0
            while place < len(now := items()):
                if not self.consider(without(now[place : place + size])):
                    place += size
            size //= 2

    def first_of(self, candidates: Sequence[FailingCase]) -> bool:
        """Accept the first of these that `consider` accepts."""
        return any(self.consider(candidate) for candidate in candidates)
