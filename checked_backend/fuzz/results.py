"""The result of a checked program, which differences PyTorch documents, and which failures are one bug."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated

from pydantic import AfterValidator

from checked_backend.errors import FuzzError
from checked_backend.findings import Finding
from checked_backend.fuzz.build import function_source
from checked_backend.fuzz.known import plain
from checked_backend.fuzz.program import MARKS, FuzzProgram, Ref, decode_program, encode_program
from checked_backend.runs.case import STRICT, Status
from checked_backend.subjects import Subject, SubjectKind

ANY = "any operator"
"""The operator of a difference that is made at the edge of a compiled program, and of a documented one."""

SEVERAL = "several operators"
"""The operator of a death of the process that could not be made small."""

DEATHS = ("crash.signal", "crash.exit", "crash.hang")
"""The finer kinds of failures that are the end of a process."""

_SIGNAL = re.compile(r"\bSIG[A-Z]+\b")
_SMALL = 3
_AT_THE_EDGE = (
    ("alias.identity", "the same object: ", "shared memory: "),  # one tensor that is returned twice
    ("mutation.uncounted", "", ""),  # whoever runs the kernels counts what they write to
    ("structure.outputs", "", ""),  # another number of results
    ("structure.type", "None", "Tensor"),  # zeros for results whose gradients were not asked for
)
"""By the finer kind, how what eager has begins, and what the compiled program has."""


@functools.lru_cache(maxsize=1024)
def callable_program(text: str) -> FuzzProgram:
    """A program that has a source; a FuzzError if a call has too few arguments, or others than it takes."""
    program = decode_program(text)
    try:
        function_source(program)
    except (ArithmeticError, AttributeError, LookupError, RecursionError, SyntaxError, TypeError, ValueError) as error:
        raise FuzzError(f"a program: {type(error).__name__}: {error}") from None
    return program


def _checked_program(text: str) -> str:
    try:
        callable_program(text)
    except FuzzError as error:
        raise ValueError(str(error)) from None  # which says where it is in the file
    return text


@dataclass(frozen=True, slots=True)
class ProgramResult:
    """The result for one program.

    Attributes:
        status: A verdict, or how its process ended.
        seconds: How long it took; of a batch, its share.
        kind: The kind of the worst finding; empty if there is none.
        op: The operator at fault, where one was found.
        report: The report as JSON, of what did not pass.
        program: The program that fails, where that is several as one; empty if it is the one that was asked for.
    """

    __pydantic_config__ = STRICT

    status: Status
    message: str = ""
    seconds: float = 0.0
    compiled: bool = False
    kind: str = ""
    detail: str = ""
    subject: str = ""
    stage: str = ""
    op: str = ""
    expected: str = ""
    actual: str = ""
    report: str = field(default="", repr=False)
    program: str = field(default="", repr=False)

    def fails_as(self, other: ProgramResult) -> bool:
        """Whether both fail in the same way, as far as their kinds tell."""
        return (self.kind, self.detail) == (other.kind, other.detail)


_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True, slots=True)
class Difference:
    """A class of documented differences."""

    reason: str
    source: str
    covers: Callable[[Finding | ProgramResult], bool]


def _is_one_object_for_two_outputs(found: Finding | ProgramResult) -> bool:
    """Two outputs that are views of the same elements came back as one object.

    Eager's one object as two is no such thing, nor is an input that is returned in the place of a view of it: AOT
    autograd says which outputs are inputs, and makes them so.
    """
    expected, actual = found.expected or "", found.actual or ""
    other = actual.removeprefix("the same object: ")
    both = all(Subject(subject).kind is SubjectKind.OUTPUT for subject in (found.subject, other))
    return both and other != actual and expected == f"shared memory: {other}"


def _is_another_layout_of_a_result(found: Finding | ProgramResult) -> bool:
    """A result has other strides. What the caller's own tensors have is for nobody to choose.

    A stride of 0 that eager has not is no layout, but elements that share memory: they cannot be written to.
    """
    if Subject(found.subject).kind not in (SubjectKind.OUTPUT, SubjectKind.GRADIENT):
        return False
    expected, actual = (_NUMBER.findall(text or "") for text in (found.expected, found.actual))
    return bool(actual) and len(expected) == len(actual) and ("0" not in actual or "0" in expected)


DOCUMENTED: Mapping[str, Difference] = {
    "alias.identity": Difference(
        "a compiler may return one tensor object for two views of the same elements",
        "https://github.com/pytorch/pytorch/issues/191449",
        _is_one_object_for_two_outputs,
    ),
    "structure.stride": Difference(
        "a compiler may choose other strides for results; the values are eager's",
        "https://discuss.pytorch.org/t/is-it-normal-for-compiled-model-outputs-to-have-different-tensor-strides/223469",
        _is_another_layout_of_a_result,
    ),
}
"""The classes, by the finer kind of finding.

Zeros where eager leaves no gradient are none of them: the check takes both for the same, so what it tells of a gradient
that only one side has is about numbers that are not zero.
"""


def documented(found: Finding | ProgramResult) -> Difference | None:
    """The documented difference that a finding is; None if it may be a bug."""
    known = DOCUMENTED.get(found.detail)
    return known if known is not None and known.covers(found) else None


@dataclass(frozen=True, slots=True)
class Group:
    """A bug, as far as can be told.

    Attributes:
        detail: The finer kind; of a crash also the exception.
        op: The operator at fault, or the operations of the smallest program in order.
        text: The smallest program as JSON.
        met: How many programs failed so.
        number: Its number in a corpus; 0 if it is in none.
    """

    __pydantic_config__ = STRICT

    kind: str
    detail: str
    stage: str
    op: str
    text: Annotated[str, AfterValidator(_checked_program)]
    result: ProgramResult
    confirmed: bool = False
    met: int = 0
    script: str = ""
    script_shows: bool = False
    localized: bool = False
    number: int = 0

    @property
    def program(self) -> FuzzProgram:
        """The smallest program."""
        return callable_program(self.text)

    @property
    def signature(self) -> str:
        """The facts that the failures of a group share: kind, finer kind, stage, operator."""
        return f"{self.detail or self.kind} | {self.stage} | {self.op}"

    @property
    def is_death(self) -> bool:
        """Whether it is the end of a process."""
        return self.result.detail in DEATHS

    @property
    def difference(self) -> Difference | None:
        """The documented difference that it is; None if it may be a bug."""
        return documented(self.result)

    def joined(self, other: Group) -> Group:
        """Both as one, with the smaller program."""
        return self if _rank(self) <= _rank(other) else replace(other, number=self.number)


def _rank(group: Group) -> tuple[bool, bool, tuple[int, ...]]:
    return not group.confirmed, not group.localized, group.program.size


def _ops(program: FuzzProgram) -> list[str]:
    """The operators of a program in order, each once. What takes an element of several results is none."""
    computed = [Ref(len(program.inputs) + place) for place in range(len(program.calls))]
    found: list[str] = []
    for call in program.calls:
        if call.op in MARKS:
            continue
        takes = call.op == "getitem" and isinstance(call.args[1], int) and call.args[0] in computed
        if not takes and plain(call.op) not in found:
            found.append(plain(call.op))
    return found


def signature_of(program: FuzzProgram, result: ProgramResult) -> Group:
    """The group of a failure."""
    detail = result.detail or result.kind
    if result.detail in DEATHS:
        signals = _SIGNAL.findall(result.actual)
        detail = f"{detail}: {signals[0]}" if signals else detail
    elif result.kind == "crash" and result.actual:
        raised = result.actual.split(":")[0].split("(")[0].strip()
        detail = f"{detail}: {raised}" if raised.isidentifier() else detail
    ops = _ops(program)
    op = plain(result.op) if result.op else " > ".join(ops)
    if result.detail in DEATHS and not result.op and len(ops) > _SMALL:  # its operators say nothing of the bug
        op = SEVERAL
    stage = result.stage
    if result.kind == "mutation" and result.subject.startswith("state["):  # a setting of torch that is left changed
        op = ANY
    if any(
        result.detail == finer and result.expected.startswith(has) and result.actual.startswith(other)
        for finer, has, other in _AT_THE_EDGE
    ):
        op = ANY
    if documented(result) is not None:
        op, stage = ANY, ""  # who knows of one of these knows of all
    return Group(result.kind, detail, stage, op, encode_program(program), result, localized=bool(result.op))


def may_be(group: Group, program: FuzzProgram, result: ProgramResult) -> bool:
    """Whether a failure may be a bug that is known: of the same kind, in a program with all of its operations."""
    other = signature_of(program, result)
    if (other.kind, other.detail) != (group.kind, group.detail):
        return False
    if group.op == other.op == ANY:
        return True
    return set(_ops(group.program)) <= set(_ops(program))
