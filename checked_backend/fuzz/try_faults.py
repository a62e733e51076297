"""Try planted faults in this process: whether `checked_backend.fuzz` finds each, and accuses no right compiler."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from checked_backend.fuzz import examine as examining
from checked_backend.fuzz.examined import Examined
from checked_backend.fuzz.generate.choices import Choices
from checked_backend.fuzz.generate.make import make_program, rules_for
from checked_backend.fuzz.planted import CONTROL, FAULTS, SHARED, Fault
from checked_backend.fuzz.program import Constant, FuzzProgram, Input, Ref, Statement
from checked_backend.runs.status import Status

__all__ = ["PLAIN", "Tried", "try_faults"]

_DYNAMO_ALONE = "eager"


@dataclass(frozen=True, slots=True)
class Tried:
    """The result for one planted fault.

    Attributes:
        fault: Its name; `CONTROL` is the right compiler.
        words: A description of the fault.
        caught: Whether a check said so.
        programs: After how many programs; of the control, how many there were.
        left_out: How many of them say nothing, because Dynamo alone gets them wrong in the same way: bugs of torch.
        undecided: How many of them got no verdict.
        finding: The kind of finding, in words.
        seconds: How long it took.
    """

    fault: str
    words: str
    caught: bool
    programs: int
    left_out: int = 0
    undecided: int = 0
    finding: str = ""
    seconds: float = 0.0

    @property
    def right(self) -> bool:
        """Whether the outcome is the wanted one: a fault is found; the control has no finding, and mostly passes."""
        if self.fault != CONTROL:
            return self.caught
        return not self.caught and 2 * (self.left_out + self.undecided) < self.programs

    @property
    def tried_words(self) -> str:
        """How many programs there were, and how many of them say nothing."""
        without = f", {self.left_out} left out: torch alone gets them wrong in the same way" if self.left_out else ""
        unclear = f", {self.undecided} without a verdict" if self.undecided else ""
        return f"{self.programs} programs{without}{unclear}"


def _plain(*calls: Statement, dtype: str = "float32", **more: Any) -> FuzzProgram:
    given = Input(dtype, (4, 4), (4, 1), seed=1, requires_grad=bool(more.get("gradients")))
    return FuzzProgram((given,), calls, (len(calls),), **more)


PLAIN: Mapping[str, FuzzProgram] = MappingProxyType(
    {
        "sums": _plain(
            Statement("torch.exp", (Ref(0),)), Statement("torch.add", (Ref(1), 1)), Statement("torch.sum", (Ref(2), 1))
        ),
        "views": _plain(Statement("Tensor.t", (Ref(0),)), Statement("Tensor.mul_", (Ref(1), 2))),
        "hyperbolic": _plain(Statement("torch.sinh", (Ref(0),))),
        "integers": _plain(
            Statement("torch.mul", (Ref(0), 3)), Statement("torch.clamp", (Ref(1), -2, 5)), dtype="int64"
        ),
        "half": _plain(
            Statement("torch.matmul", (Ref(0), Ref(0))), Statement("torch.relu", (Ref(1),)), dtype="bfloat16"
        ),
        "casts": _plain(Statement("Tensor.to", (Ref(0), Constant("float64"))), Statement("torch.neg", (Ref(1),))),
        "gradients": _plain(
            Statement("torch.tanh", (Ref(0),)), Statement("torch.mul", (Ref(1), Ref(0))), gradients=True
        ),
        "sizes": _plain(
            Statement("torch.sin", (Ref(0),)), Statement("torch.mean", (Ref(1), 0)), gradients=False, dynamic=True
        ),
    }
)
"""Programs that each torch and each right compiler get right. What is reported of them is a false alarm."""

_IN_ONE_COMPILE = ("sums", "hyperbolic", "integers", "views")
_WRONG_IN_ONE_COMPILE = "hyperbolic"


def try_faults(
    names: Sequence[str], *, seed: int, most: int, control: int, note: Callable[[str], None]
) -> Iterator[Tried]:
    """Check programs with each fault until one shows it.

    Args:
        names: The faults.
        most: How many programs there are for a fault, at most.
        control: How many random programs there are for the right compiler, after `PLAIN`.
        note: Called with what begins now.

    Yields:
        What came out, as soon as it is known.
    """
    rules = rules_for(())
    for name in names:
        note(f"trying {name}")
        fault, began = FAULTS[name], time.monotonic()

        def programs(fault: Fault = fault) -> Iterator[FuzzProgram]:
            if fault.dynamic:
                yield PLAIN["sizes"]  # one of them takes as long as ten of fixed sizes
                return
            wanted = Choices(training=fault.gradients, dynamic=False)
            for number in range(most if fault.kinds else control):
                yield make_program(seed, number, wanted, rules)

        if name == SHARED:
            tried = _in_one_compile(fault)
        elif name == CONTROL:
            tried = _accused(fault, programs())
        else:
            tried = _until_found(name, fault, programs())
        yield replace(tried, seconds=time.monotonic() - began)


def _until_found(name: str, fault: Fault, programs: Iterator[FuzzProgram]) -> Tried:
    tried = Tried(name, fault.words, caught=False, programs=0)
    for program in programs:
        result = examining.check_program(program, fault.compiler)
        tried = _one_more(tried, result)
        if not fault.is_told_by(result.kind, result.detail):
            continue
        if not _is_of_torch(program, result):
            return replace(tried, caught=True, finding=result.message)
        tried = replace(tried, left_out=tried.left_out + 1)
    return tried


def _accused(fault: Fault, programs: Iterator[FuzzProgram]) -> Tried:
    """Whether anything is reported of a right compiler. Nothing excuses a report of plain programs."""
    tried = Tried(CONTROL, fault.words, caught=False, programs=0)
    plain = [(name, examining.check_program(program, fault.compiler)) for name, program in PLAIN.items()]
    together = examining.examine([PLAIN[name] for name in _IN_ONE_COMPILE], fault.compiler)
    plain += [(f"{_IN_ONE_COMPILE[place]}, in one compile with others", result) for place, result in together]
    for name, result in plain:
        tried = _one_more(tried, result)
        if result.status is not Status.PASS or result.kind:
            told = f"a plain program ({name}): {result.status.value}: {result.message}"
            return replace(tried, caught=True, finding=told)
    for program in programs:
        result = examining.check_program(program, fault.compiler)
        tried = _one_more(tried, result)
        if not result.kind:
            continue
        if not _is_of_torch(program, result):
            return replace(tried, caught=True, finding=result.message)
        tried = replace(tried, left_out=tried.left_out + 1)
    return tried


def _in_one_compile(fault: Fault) -> Tried:
    """Whether one wrong program is found among others that share its compile, and no other is accused."""
    programs = [PLAIN[name] for name in _IN_ONE_COMPILE]
    found = {_IN_ONE_COMPILE[place]: result for place, result in examining.examine(programs, fault.compiler)}
    wrong = found[_WRONG_IN_ONE_COMPILE]
    others = [name for name, one in found.items() if one.status is not Status.PASS and name != _WRONG_IN_ONE_COMPILE]
    caught = fault.is_told_by(wrong.kind, wrong.detail) and not others
    told = wrong.message if caught else f"accused beside it: {', '.join(others)}" if others else ""
    return Tried(SHARED, fault.words, caught, len(programs), finding=told)


def _one_more(tried: Tried, result: Examined) -> Tried:
    undecided = tried.undecided + (result.status is Status.INCONCLUSIVE)
    return replace(tried, programs=tried.programs + 1, undecided=undecided)


def _is_of_torch(program: FuzzProgram, result: Examined) -> bool:
    """Whether Dynamo alone gets a program wrong in the same way."""
    alone = examining.check_program(program, _DYNAMO_ALONE)
    return (alone.kind, alone.detail) == (result.kind, result.detail)
