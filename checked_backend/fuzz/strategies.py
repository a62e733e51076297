"""Programs drawn by Hypothesis, for tests of your own. It needs ``pip install hypothesis``.

A test of a compiler gets Hypothesis's choice of programs, and its database of those that failed, which come first in
the next run. `checked_backend.fuzz.shrink` makes a program smaller in seconds, for which Hypothesis needs minutes:

    @settings(deadline=None, phases=[Phase.reuse, Phase.generate], suppress_health_check=[HealthCheck.too_slow])
    @given(programs(longest=5))
    def test_my_compiler(program: FuzzProgram) -> None:
        assert_passes(program, my_compiler)
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import hypothesis
from hypothesis import strategies as st

from checked_backend.errors import FuzzError
from checked_backend.fuzz.build import function_source
from checked_backend.fuzz.examine import Compiler, check_program
from checked_backend.fuzz.generate.draft import Choices
from checked_backend.fuzz.generate.make import draw_program, due, rules_for
from checked_backend.fuzz.program import DTYPES, FuzzProgram
from checked_backend.fuzz.results import ProgramResult, documented
from checked_backend.fuzz.shrink import shrink
from checked_backend.fuzz.text import describe_inputs
from checked_backend.runs.case import Status
from checked_backend.sweep.examine import refuse_unknown

_TURNS = 2000
_BYTES = 7  # random() has 53 bits
_DYNAMO_ALONE = "eager"


def programs(
    *,
    ops: Sequence[str] = (),
    dtypes: Sequence[str] = (),
    training: bool | None = None,
    dynamic: bool | None = None,
    longest: int = 8,
) -> st.SearchStrategy[FuzzProgram]:
    """A strategy for programs that eager runs, and repeats.

    Args:
        ops: Patterns of names of operations, as in a shell: ``add*``, ``F.gelu``; empty for all.
        dtypes: Names of dtypes of inputs; empty for all.
        training: Whether programs are differentiated; None for some.
        dynamic: Whether they are meant for symbolic sizes; None for some.
        longest: The greatest number of calls that are not the turn's: each operator has its turn.

    Raises:
        FuzzError: ``ops`` names no operation that is known, or ``dtypes`` a dtype that inputs cannot have.
    """
    if unknown := [name for name in dtypes if name not in DTYPES]:
        raise FuzzError(f"dtypes has {', '.join(map(repr, unknown))}; expected {', '.join(DTYPES)}")
    choices = Choices(tuple(ops), tuple(dtypes), training, dynamic, longest)
    if not rules_for(choices.ops):
        raise FuzzError("ops names no operation that is known")
    return _drawn(choices)


@st.composite
def _drawn(draw: st.DrawFn, choices: Choices) -> FuzzProgram:
    turn = [] if choices.ops else due(0, draw(st.integers(0, _TURNS)))
    program = draw_program(_Drawn(draw), choices, turn)
    return program if program is not None else hypothesis.reject()


def assert_passes(
    program: FuzzProgram, compiler: Compiler, options: Mapping[str, Any] | None = None, *, seconds: float = 20.0
) -> None:
    """Check a program in a test of Hypothesis, and raise if it is wrong; what PyTorch documents as a difference is not.

    A program without a verdict is no example that passed, and what Dynamo alone gets wrong is not the compiler's doing:
    Hypothesis draws another program, and its statistics have the reason.

    Args:
        program: The program.
        compiler: A backend of ``torch.compile``, by name or as a function.
        options: The compiler's options.
        seconds: How long a wrong program is made smaller. 0 leaves it as it is.

    Raises:
        AssertionError: It is wrong. The text has the finding, and the smallest program that has one of its kind.
        UnsatisfiedAssumption: It says nothing about the compiler; Hypothesis catches it.
        FuzzError: The same outside of a test of Hypothesis.
        OptionError: There is no backend of that name.
    """
    refuse_unknown(compiler)
    first = check_program(program, compiler, options)
    if not first.kind and first.status is not Status.PASS:
        _leave_out(f"without a verdict: {first.message}")
    if not _is_wrong(first):
        return
    if compiler != _DYNAMO_ALONE and _is_same_fault(first, check_program(program, _DYNAMO_ALONE)):
        _leave_out(f"Dynamo alone is wrong: {first.message}")
    last = first

    def goes_wrong(smaller: FuzzProgram) -> bool:
        nonlocal last
        came = check_program(smaller, compiler, options)
        if not _is_same_fault(first, came):
            return False
        last = came
        return True

    smallest = shrink(program, goes_wrong, time.monotonic() + seconds)
    raise AssertionError("\n".join([last.message, *describe_inputs(smallest), function_source(smallest)]))


def _is_wrong(result: ProgramResult) -> bool:
    return bool(result.kind) and documented(result) is None


def _is_same_fault(one: ProgramResult, other: ProgramResult) -> bool:
    return _is_wrong(other) and one.fails_as(other)


def _leave_out(why: str) -> NoReturn:
    if not hypothesis.currently_in_test_context():
        raise FuzzError(f"the program says nothing about the compiler: {why}")
    hypothesis.event(why)
    hypothesis.reject()


class _Drawn(random.Random):
    """A source of choices that Hypothesis makes, all equally likely.

    Hypothesis's own ``randoms()`` leaves weights out, and its numbers prefer special values. Bytes do neither. The
    simplest choice is the least number: the first of a list, the least integer, "no" of `Draft.chance`.
    """

    def __init__(self, draw: Callable[[st.SearchStrategy[bytes]], bytes]) -> None:
        super().__init__(0)
        self._draw = draw

    def getrandbits(self, k: int) -> int:
        """An integer of so many bits."""
        words = -(-k // (8 * _BYTES))
        drawn = b"".join(self._draw(st.binary(min_size=_BYTES, max_size=_BYTES)) for _ in range(words))
        return int.from_bytes(drawn, "big") >> (8 * _BYTES * words - k)

    def random(self) -> float:
        """A number from 0, below 1."""
        return self.getrandbits(53) * 2.0**-53
