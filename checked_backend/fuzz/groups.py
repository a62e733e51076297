"""One bug is one row: failures are grouped by what differs, and by the operator at fault."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from checked_backend.fuzz.documented import Difference, documented
from checked_backend.fuzz.examined import Examined
from checked_backend.fuzz.known import plain
from checked_backend.fuzz.program import CONTROL, FuzzProgram, Ref

__all__ = ["DEATHS", "Group", "may_be", "signature_of"]

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


@dataclass(frozen=True, slots=True)
class Group:
    """A bug, as far as can be told.

    Attributes:
        kind: The kind of finding.
        detail: The finer kind; of a crash also the exception.
        stage: The stage of compilation in which it arises.
        op: The operator at fault, or the operations of the smallest program in order.
        program: The smallest program that shows it.
        result: What came out for that.
        confirmed: Whether it failed in a fresh process.
        met: How many programs failed so.
        script: A stand-alone script; empty if there is none.
        script_shows: Whether the script failed in a fresh process.
        localized: Whether the operator was looked for.
        number: Its number in a database; 0 if it is in none.
    """

    kind: str
    detail: str
    stage: str
    op: str
    program: FuzzProgram
    result: Examined
    confirmed: bool = False
    met: int = 1
    script: str = ""
    script_shows: bool = False
    localized: bool = False
    number: int = 0

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
        """Both as one: the smaller program, and how often both were met."""
        first, second = (self, other) if _rank(self) <= _rank(other) else (other, self)
        return replace(first, met=first.met + second.met, number=self.number)


def _rank(group: Group) -> tuple[bool, bool, tuple[int, ...]]:
    return not group.confirmed, not group.localized, group.program.size


def _value_of(raw: Any) -> int | None:
    return raw.value if isinstance(raw, Ref) else None


def _ops(program: FuzzProgram) -> list[str]:
    """The operators of a program in order, each once. What takes an element of several results is none."""
    tuples = {len(program.inputs) + place for place, call in enumerate(program.calls)}
    found: list[str] = []
    for call in program.calls:
        if call.op in CONTROL and call.op not in program.ops:
            continue
        takes = call.op == "getitem" and isinstance(call.args[1], int) and _value_of(call.args[0]) in tuples
        if not takes and plain(call.op) not in found:
            found.append(plain(call.op))
    return found


def signature_of(program: FuzzProgram, result: Examined) -> Group:
    """The group of a failure.

    Args:
        program: The program, as small as it was made.
    """
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
    return Group(result.kind, detail, stage, op, program, result, localized=bool(result.op))


def may_be(group: Group, program: FuzzProgram, result: Examined) -> bool:
    """Whether a failure may be a bug that is known: of the same kind, in a program with all of its operations."""
    other = signature_of(program, result)
    if (other.kind, other.detail) != (group.kind, group.detail):
        return False
    if group.op == other.op == ANY:
        return True
    return set(_ops(group.program)) <= set(_ops(program))
