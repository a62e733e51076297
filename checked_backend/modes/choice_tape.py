"""Record the choices that a program makes by floating-point values, and replay them in a run whose roundings differ.

Such a choice is an index, a bucket, or a comparison next to its threshold. Where rounding flips a choice, results jump,
and noise that is measured with such jumps hides everything smaller. With the choices replayed, only the noise of
rounding is left.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from checked_backend._torch.modes import DisableTorchDispatch
from checked_backend._torch.operators import OpOverload
from checked_backend.graphs.operators import Operator, OperatorKind
from checked_backend.modes.base import OperatorMode, tensors_in, written_tensors
from checked_backend.numerics.bits import is_floating

CHOOSING = frozenset(
    {"round", "floor", "ceil", "trunc", "fix", "sign", "sgn", "heaviside", "floor_divide",
     "eq", "ne", "lt", "le", "gt", "ge", "histc"}
)  # fmt: skip
"""Base names of operators whose result is a choice, even if its dtype is floating."""

# The number of different values decides the shapes of all results of these operators, floating ones included.
_WHOLE = ("unique", "_unique")


@dataclass(frozen=True, slots=True)
class _Choice:
    """The tensors that one operator chose, in order: first those that it wrote to, then those that it returned."""

    op: str
    values: tuple[torch.Tensor, ...]


class ChoiceTape(list[_Choice]):
    """The choices of a program, in order. They can be replayed in any number of runs."""


def _chosen(operator: Operator, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> list[torch.Tensor]:
    """The tensors, among those that a call wrote to or returned, that are choices made by floating-point values."""
    if operator.draws or operator.kind is OperatorKind.UNINITIALISED:
        return []
    if not any(map(is_floating, tensors_in([*args, *kwargs.values()]))):
        return []
    found: list[torch.Tensor] = []
    for tensor in tensors_in([*written_tensors(operator, args, kwargs), result]):
        if tensor.layout is torch.strided and not any(tensor is other for other in found):
            found.append(tensor)
    if operator.base.startswith(_WHOLE) or kwargs.get("rounding_mode") is not None:
        return found
    if operator.base in CHOOSING:
        return [tensor for tensor in found if not tensor.is_complex()]  # the sign of a complex number does not jump
    return [tensor for tensor in found if not is_floating(tensor)]


class RecordChoices(OperatorMode):
    """Run a program as it is, and write its choices on a tape.

    Args:
        tape: Choices are appended to it.
    """

    def __init__(self, tape: ChoiceTape) -> None:
        super().__init__()
        self._tape = tape

    def run(self, func: OpOverload, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operator, and record a copy of its choices."""
        result = func(*args, **kwargs)
        chosen = _chosen(operator, args, kwargs, result)
        if chosen:
            with DisableTorchDispatch():
                values = tuple(tensor.detach().clone() for tensor in chosen)
            self._tape.append(_Choice(operator.name, values))
        return result


class ReplayChoices(OperatorMode):
    """Run a program with the choices on a tape in place of its own.

    A program that departs from the recorded sequence of choices makes its own choices from there on.

    Args:
        tape: Recorded by :class:`RecordChoices` from the same program at the same precision.

    Attributes:
        flips: The number of operators whose own choice differed. The departure counts as one.
    """

    def __init__(self, tape: ChoiceTape) -> None:
        super().__init__()
        self.flips = 0
        self._tape = tape
        self._position = 0
        self._lost = False

    def run(self, func: OpOverload, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operator, and replace its choices by the recorded ones."""
        result = func(*args, **kwargs)
        if self._lost:
            return result
        chosen = _chosen(operator, args, kwargs, result)
        if not chosen:
            return result
        recorded = self._next(operator, chosen)
        if recorded is None:
            self._lost = True
            self.flips += 1
            return result
        with DisableTorchDispatch():
            return self._with_recorded(result, chosen, recorded)

    def _next(self, operator: Operator, chosen: Sequence[torch.Tensor]) -> Sequence[torch.Tensor] | None:
        if self._position >= len(self._tape):
            return None
        choice = self._tape[self._position]
        self._position += 1
        if choice.op != operator.name or len(choice.values) != len(chosen):
            return None
        same = all(one.dtype == other.dtype for one, other in zip(choice.values, chosen, strict=True))
        return choice.values if same else None

    def _with_recorded(self, result: Any, chosen: Sequence[torch.Tensor], recorded: Sequence[torch.Tensor]) -> Any:
        flipped = [not _same(one, other) for one, other in zip(chosen, recorded, strict=True)]
        if not any(flipped):
            return result
        self.flips += 1
        replaced: list[tuple[torch.Tensor, torch.Tensor]] = []
        for own, value in zip(chosen, recorded, strict=True):
            if own.shape == value.shape:
                own.detach().copy_(value)
            else:
                replaced.append((own, value.clone()))
        return _replaced(result, replaced) if replaced else result


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape:
        return False
    return bool(((one == other) | ((one != one) & (other != other))).all())


def _replaced(result: Any, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Any:
    if isinstance(result, torch.Tensor):
        return next((new for old, new in pairs if old is result), result)
    if isinstance(result, (list, tuple)):
        return type(result)([_replaced(item, pairs) for item in result])
    return result
