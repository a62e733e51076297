"""A program in the making: each call is run in eager at once, so that its result is known to the next."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from checked_backend.errors import FuzzError
from checked_backend.fuzz.build import dtype_name, make_inputs, same_value, strides_of
from checked_backend.fuzz.generate.defined import MOST_ELEMENTS, draws, run_defined, run_defined_call
from checked_backend.fuzz.program import FuzzProgram, Input, Ref, Size, Statement


class NothingFits(ValueError):
    """Raised if no value so far, or none that a program can have, fits a call."""


@dataclass(frozen=True, slots=True)
class Choices:
    """The user's choices for generated programs.

    Attributes:
        ops: Patterns of names of operations, as in a shell; empty for all.
        training: Whether programs are differentiated; None for some.
        dynamic: Whether sizes are symbolic; None for some.
    """

    ops: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    training: bool | None = None
    dynamic: bool | None = None
    longest: int = 8


def chance(rng: random.Random, probability: float) -> bool:
    """Whether something of this probability happens. It does not for the least number, which is the simplest choice."""
    return rng.random() >= 1 - probability


_DTYPES = {
    "float32": 40,
    "bfloat16": 8,
    "float16": 8,
    "float64": 8,
    "int64": 9,
    "int32": 6,
    "int16": 3,
    "int8": 6,
    "uint8": 6,
    "bool": 5,
    "complex64": 1,
}
_SIZES = (1, 2, 3, 4, 5, 7, 8, 9, 16, 17)
_MOST_OF_INPUT = 512
_SCALARS = (0, 1, 1, 2, 2, 3, -1, -2, 5, 7, 0.5, -0.5, 1.5, 2.0, 0.1, 1e-3, 10, 100, 127, True)


@dataclass(slots=True, eq=False)
class Draft:
    """The program so far, and the values that its calls have in eager.

    Attributes:
        values: What each input and each call is in eager. In a block that is not finished they are as if each of its
            statements ran once, those after an ``else`` too.
        turns: The loops around what is added now, each as the number of its turn.
    """

    rng: random.Random
    choices: Choices
    gradients: bool
    dynamic: bool
    values: list[Any] = field(default_factory=list)
    turns: list[Ref] = field(default_factory=list)
    _entries: list[Input | Statement] = field(default_factory=list)
    _open: list[int] = field(default_factory=list)
    _before: list[Any] = field(default_factory=list)
    _hidden: set[int] = field(default_factory=set)
    _next: Ref | None = None

    def chance(self, probability: float) -> bool:
        """Whether something of this probability happens."""
        return chance(self.rng, probability)

    # inputs

    def dtype(self) -> str:
        """A dtype for an input."""
        allowed = {name: weight for name, weight in _DTYPES.items() if name in (self.choices.dtypes or _DTYPES)}
        return self.rng.choices(list(allowed), list(allowed.values()))[0]

    def shape(self) -> tuple[int, ...]:
        """A shape for an input."""
        dims = self.rng.choices((0, 1, 2, 3, 4), (6, 25, 38, 20, 11))[0]
        while True:
            shape = tuple(0 if self.chance(0.015) else self.rng.choice(_SIZES) for _ in range(dims))
            if torch.Size(shape).numel() <= _MOST_OF_INPUT:
                return shape

    def new_input(self, dtype: str = "", shape: Sequence[int] | None = None, **more: Any) -> Ref:
        """Add an input: of any layout and any values, if no other fields of `Input` are given."""
        dtype = dtype or self.dtype()
        shape = self.shape() if shape is None else tuple(shape)
        fill = self.rng.choices(("range", "normal", "edges"), (65, 20, 15))[0]
        given = Input(dtype, shape, strides_of(shape), fill=fill, seed=self.rng.getrandbits(31))
        if "stride" not in more:
            given = self._laid_out(given)
        floating = dtype.startswith(("float", "bfloat", "complex"))
        grad = self.gradients and floating and self.chance(0.8)
        given = replace(given, **{"requires_grad": grad, **more})
        return self._keep(given, make_inputs([given])[0])

    def shared_input(self) -> Ref | None:
        """Add an input that shares memory with an earlier one; None if there is none.

        That one is not differentiated: autograd does not see what is written to its memory through another tensor.
        """
        roots = [
            (place, entry)
            for place, entry in enumerate(self._entries)
            if isinstance(entry, Input) and entry.shares is None and entry.extent > 1 and not entry.requires_grad
        ]
        if not roots:
            return None
        root, of = self.rng.choice(roots)
        offset = self.rng.randrange(of.extent) if self.chance(0.5) else 0
        size, step = of.extent - offset, self.rng.choice((1, 1, 2))
        shape: tuple[int, ...] = ((size - 1) // step + 1,)
        stride: tuple[int, ...] = (step,)
        if self.chance(0.4):
            shape, stride, offset = of.shape, of.stride, of.offset
        given = Input(of.dtype, shape, stride, offset, root, requires_grad=False)
        storage = self.values[root].detach()
        return self._keep(given, storage.as_strided(shape, stride, offset))

    def _laid_out(self, given: Input) -> Input:
        """The same input with any layout: dense, transposed, channels last, expanded, with gaps, at an offset."""
        shape, dims = given.shape, len(given.shape)
        way = self.rng.choices(("dense", "transposed", "expanded", "gaps", "offset"), (55, 18, 10, 10, 7))[0]
        if way == "transposed" and dims > 1:
            order = self.rng.sample(range(dims), dims)
            if dims == 4 and self.chance(0.5):
                order = [0, 2, 3, 1]
            return replace(given, stride=strides_of(shape, order))
        if way == "expanded" and dims:
            dim = self.rng.randrange(dims)
            once = [1 if d == dim else size for d, size in enumerate(shape)]
            stride = tuple(0 if d == dim else step for d, step in enumerate(strides_of(once)))
            return replace(given, stride=stride)
        if way == "gaps" and dims:
            return replace(given, stride=tuple(2 * step for step in given.stride))
        return replace(given, offset=self.rng.randrange(1, 5)) if way == "offset" else given

    # values that are there

    def tensors(self, wanted: Callable[[torch.Tensor], bool] = lambda _: True) -> list[Ref]:
        """The tensors so far that are wanted."""
        return [
            Ref(place)
            for place, value in enumerate(self.values)
            if isinstance(value, torch.Tensor) and place not in self._hidden and wanted(value)
        ]

    def value(self, ref: Ref) -> torch.Tensor:
        """The value in eager."""
        found = self.values[ref.value]
        if not isinstance(found, torch.Tensor):
            raise FuzzError(f"value {ref.value} of a program that is being made is no tensor")
        return found

    def any(self, wanted: Callable[[torch.Tensor], bool] = lambda _: True) -> Ref | None:
        """Any wanted tensor; later ones more often. None if there is none."""
        found = self.tensors(wanted)
        if self._next in found:
            chosen, self._next = self._next, None
            return chosen
        return self.rng.choices(found, [1 + 2 * place for place in range(len(found))])[0] if found else None

    def some(self, wanted: Callable[[torch.Tensor], bool] = lambda _: True) -> Ref:
        """Like `any`, for a call that cannot do without: `NothingFits` is raised if there is none."""
        found = self.any(wanted)
        if found is None:
            raise NothingFits
        return found

    def read_next(self, ref: Ref | None) -> None:
        """Let `any` choose this tensor as soon as it is wanted, once; None to take that back."""
        self._next = ref

    def at_least(self, dims: int) -> Ref:
        """A tensor of so many dimensions or more; a new input if there is none."""
        found = self.any(lambda tensor: tensor.dim() >= dims)
        if found is not None:
            return found
        return self.new_input(shape=[self.rng.choice(_SIZES[:8]) for _ in range(dims)])

    def scalar(self) -> Any:
        """A Python number. In a dynamic program it may be a size, in a loop the number of the turn."""
        if self.turns and self.chance(0.3):
            return self.rng.choice(self.turns)
        if self.dynamic and self.chance(0.15):
            found = self.any(lambda tensor: tensor.dim() > 0)
            if found is not None:
                return Size(found.value, self.rng.randrange(self.value(found).dim()))
        return self.rng.choice(_SCALARS)

    def partner(self, of: Ref) -> Any:
        """The other operand of a binary operation: a number, a tensor there is, or a new input that broadcasts."""
        if self.chance(0.25):
            return self.scalar()
        shape = self.value(of).shape
        found = self.any(lambda tensor: _broadcast(tensor.shape, shape))
        if found is not None and self.chance(0.65):
            return found
        return self.fitting(shape, "" if self.chance(0.3) else dtype_name(self.value(of)))

    def fitting(self, shape: Sequence[int], dtype: str = "") -> Ref:
        """A new input that broadcasts to a shape."""
        own = [1 if self.chance(0.15) else size for size in shape]
        while own and self.chance(0.12):
            own.pop(0)
        return self.new_input(dtype, own)

    # calls

    def add(self, call: Statement | None) -> Ref | None:
        """Add a call, if eager runs it and its result is defined. Its result; None if it was not added."""
        if call is None:
            return None
        try:
            value = run_defined_call(call, self.values, gradients=self.gradients)
        except Exception:  # what eager refuses is no program; a call may raise whatever torch raises
            return None
        if self._open and draws(call.op):
            return None
        made = whole = self._keep(call, value)
        if isinstance(value, tuple | list):
            for place in sorted(self.rng.sample(range(len(value)), min(len(value), self.rng.choice((1, 1, 2))))):
                made = self._keep(Statement("getitem", (whole, place)), value[place])
        return made

    # blocks

    @property
    def in_block(self) -> bool:
        """Whether what is added now is in a loop or a branch."""
        return bool(self._open)

    def begin(self, head: Statement) -> Ref:
        """Begin a loop or a branch."""
        if not self._open:
            self._before = [one.detach().clone() if isinstance(one, torch.Tensor) else one for one in self.values]
        self._open.append(len(self._entries))
        turn = self._keep(head, 0 if head.op == "for" else None)
        if head.op == "for":
            self.turns.append(turn)
        return turn

    def otherwise(self) -> None:
        """What is added now is in the other half of a branch."""
        self._hide(self._open[-1])
        self._keep(Statement("else"), None)

    def flag(self, *, value: bool) -> Ref:
        """A flag: a Python bool that the program is given."""
        return self._keep(Statement("flag", (value,)), value)

    def let(self, target: Ref, source: Ref) -> None:
        """Give an earlier value's name to another."""
        self._keep(Statement("let", (target, source)), None)
        self.values[target.value] = self.values[source.value]

    def end(self) -> bool:
        """End a block, and say whether it was kept: the outermost is run as it will be, and must change something."""
        start = self._open.pop()
        if isinstance(head := self._entries[start], Statement) and head.op == "for":
            self.turns.pop()
        self._keep(Statement("end"), None)
        self._hide(start)
        if self._open:
            return True
        try:
            self.values = self._replayed()
        except Exception:  # in a later turn, eager refuses what it ran in the first, or its result is not defined
            kept = False
        else:  # with other sizes, a branch that is not taken may be
            kept = self.dynamic or not all(map(same_value, self._before, self.values))
        if kept:
            return True
        del self._entries[start:]
        self._hidden = {number for number in self._hidden if number < start}
        self.values = self._replayed()
        return False

    def _hide(self, start: int) -> None:
        """What a block computes is known in it alone; the inputs that were made for it are the program's."""
        here = range(start, len(self._entries))
        self._hidden |= {place for place in here if isinstance(self._entries[place], Statement)}

    def _replayed(self) -> list[Any]:
        """The values of the program so far, run from its beginning; it raises as `run_defined` does."""
        program, where = self._ordered(())
        known = run_defined(program)
        return [known[where[place]] for place in range(len(self._entries))]

    def _keep(self, entry: Input | Statement, value: Any) -> Ref:
        self._entries.append(entry)
        self.values.append(value)
        return Ref(len(self.values) - 1)

    def entry(self, ref: Ref) -> Input | Statement:
        """The input or the call of which a value is."""
        return self._entries[ref.value]

    @property
    def calls(self) -> list[Statement]:
        """The calls so far."""
        return [entry for entry in self._entries if isinstance(entry, Statement)]

    def finish(self, returns: Sequence[Ref]) -> FuzzProgram:
        """The program, with its inputs first."""
        program, _ = self._ordered(returns)
        return program.unused_dropped()

    def _ordered(self, returns: Sequence[Ref]) -> tuple[FuzzProgram, dict[int, int]]:
        """The program with its inputs first, and the new numbers of values by their numbers here."""
        order = sorted(range(len(self._entries)), key=lambda place: isinstance(self._entries[place], Statement))
        where = {old: new for new, old in enumerate(order)}
        program = FuzzProgram(
            tuple(entry for entry in self._entries if isinstance(entry, Input)),
            tuple(self.calls),
            tuple(ref.value for ref in returns),
            self.gradients,
            self.dynamic,
        )
        return program.renumbered(where.__getitem__), where


def _broadcast(one: Sequence[int], other: Sequence[int]) -> bool:
    try:
        elements: int = torch.broadcast_shapes(one, other).numel()
    except RuntimeError:
        return False
    return elements <= MOST_ELEMENTS
