"""Plainer programs of the same structure: common dtypes, no optional tensors, simple values, round numbers.

Simple values are zeros, ones, a range, small whole numbers, seeded random numbers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from checked_backend._torch.operators import OpOverload
from checked_backend.diagnose.reduce.failing_case import Draft, FailingCase, call_nodes, record_values
from checked_backend.diagnose.reduce.problem import Problem, constants_of
from checked_backend.graphs.nodes import outputs_of
from checked_backend.scripts.values import LITERAL_ELEMENTS, form_of, ramp, seeded

_WIDE: Mapping[torch.dtype, torch.dtype] = {
    torch.bfloat16: torch.float64,
    torch.float16: torch.float64,
    torch.float32: torch.float64,
    torch.complex32: torch.complex128,
    torch.complex64: torch.complex128,
}

_COMMON: Mapping[torch.dtype, torch.dtype] = {
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
    torch.float64: torch.float32,
    torch.complex128: torch.complex64,
    torch.int32: torch.int64,
    torch.int16: torch.int64,
    torch.int8: torch.int64,
    torch.uint8: torch.int64,
}


def common_dtypes(problem: Problem) -> None:
    """Use float32 and int64 for other dtypes: all of them, then one after the other."""
    problem.all_or_each(
        lambda: sorted(_dtypes(problem.best) & _COMMON.keys(), key=str),
        lambda found: _cast(problem.best, {dtype: _COMMON[dtype] for dtype in found}),
    )


def in_float64(program: FailingCase) -> FailingCase:
    """A program with double precision in place of lower precision."""
    return _cast(program, _WIDE)


def _dtypes(program: FailingCase) -> set[torch.dtype]:
    constants = [constant for node in call_nodes(program.case.graph.graph) for constant in constants_of(node)]
    found = {constant for constant in constants if isinstance(constant, torch.dtype)}
    return found | {value.dtype for value in program.case.inputs if isinstance(value, torch.Tensor)}


def _cast(program: FailingCase, dtypes: Mapping[torch.dtype, torch.dtype]) -> FailingCase:
    def cast(leaf: Any) -> Any:
        return dtypes.get(leaf, leaf) if isinstance(leaf, torch.dtype) else leaf

    draft = Draft(program)
    for node in call_nodes(draft.graph):
        node.args = fx.node.map_aggregate(node.args, cast)
        node.kwargs = fx.node.map_aggregate(node.kwargs, cast)
    for name, value in draft.inputs.items():
        if isinstance(value, torch.Tensor) and value.dtype in dtypes:
            draft.inputs[name] = value.to(dtypes[value.dtype])
    return draft.finish()


def drop_optional_tensors(problem: Problem) -> None:
    """Leave out optional tensors of calls: all of them, then one after the other."""
    problem.all_or_each(lambda: list(_optional(problem.best)), lambda places: _with(problem.best, places, None))


def _optional(program: FailingCase) -> Iterator[tuple[str, int]]:
    for node in call_nodes(program.case.graph.graph):
        if isinstance(node.target, OpOverload):
            for position, declared in enumerate(node.target._schema.arguments[: len(node.args)]):
                if str(declared.type) == "Optional[Tensor]" and isinstance(node.args[position], fx.Node):
                    yield node.name, position


def round_arguments(problem: Problem) -> None:
    """Replace floating-point numbers in calls by 1, 2, 0.5 or a number with one digit."""
    for node in call_nodes(problem.best.case.graph.graph):
        for position, value in enumerate(node.args):
            if isinstance(value, float) and value not in (0.0, 1.0, 2.0, 0.5):
                simpler = [1.0, 2.0, 0.5, float(f"{value:.1g}")]
                place = (node.name, position)
                problem.first_of([_with(problem.best, [place], number) for number in simpler])


def _with(program: FailingCase, places: Sequence[tuple[str, int]], value: float | None) -> FailingCase:
    draft = Draft(program)
    for name, position in places:
        draft.node(name).update_arg(position, value)
    return draft.finish()


def simplify_values(problem: Problem) -> None:
    """Give inputs simpler values: all of them in one way, then one after the other.

    Values on which eager gives only zeros are not taken: a program that reads or leaves memory that nobody wrote is
    right there by chance.
    """
    told = _tells(problem.best)
    problem.first_of(_telling(_together(problem.best), told))
    contiguous = {name: value.contiguous() for name, value in _tensors(problem.best).items()}
    problem.consider(problem.best.with_inputs(contiguous))
    for name in _tensors(problem.best):
        value = problem.best.placeholders()[name]
        simpler = [form for form in _forms(value) if form_of(form).rank < form_of(value).rank]
        simpler.sort(key=lambda form: form_of(form).rank)
        problem.first_of(_telling((problem.best.with_inputs({name: form}) for form in simpler), told))


def _telling(candidates: Iterable[FailingCase], told: bool) -> list[FailingCase]:
    return [program for program in candidates if not told or _tells(program)]


def _tells(program: FailingCase) -> bool:
    """Whether eager's result has more than zeros. A bool result counts in any case."""
    place = program.tracked
    if place is None or not isinstance(node := outputs_of(program.case.graph.graph)[place], fx.Node):
        return False
    with contextlib.suppress(Exception):  # values that eager refuses
        value = record_values(program, frozenset({node.name}))[node.name]
        return not isinstance(value, torch.Tensor) or value.dtype is torch.bool or bool(value.ne(0).any())
    return False


def _tensors(program: FailingCase) -> dict[str, torch.Tensor]:
    return {name: value for name, value in program.placeholders().items() if type(value) is torch.Tensor}


def _together(program: FailingCase) -> Iterator[FailingCase]:
    forms = {name: list(_forms(value)) for name, value in _tensors(program).items()}
    for at in range(max(map(len, forms.values()), default=0)):
        yield program.with_inputs({name: found[min(at, len(found) - 1)] for name, found in forms.items()})


def _forms(value: torch.Tensor) -> Iterator[torch.Tensor]:
    """Other values for a tensor, simplest first, in its strides. Integers stay within their bounds."""
    if not value.numel() or 0 in value.stride():
        return
    yield _like(value, torch.zeros(value.numel(), dtype=value.dtype))
    yield _like(value, torch.ones(value.numel(), dtype=value.dtype))
    if value.dtype is torch.bool or value.dtype.is_complex:
        return
    if not value.dtype.is_floating_point:
        bound = int(value.max()) + 1
        if bound > 0:
            yield _like(value, ramp(value.numel(), torch.int64).remainder(bound).to(value.dtype))
        return
    yield _like(value, torch.full((value.numel(),), 2.0).to(value.dtype))
    yield _like(value, ramp(value.numel(), value.dtype))
    flat = value.contiguous().reshape(-1)
    yield _like(value, flat.round())
    if value.numel() > LITERAL_ELEMENTS:
        yield _like(value, seeded(value.shape, value.dtype).reshape(-1))
    for digits in (1, 2):
        if value.numel() <= LITERAL_ELEMENTS:
            yield _like(value, torch.tensor([float(f"{item:.{digits}g}") for item in flat.tolist()]).to(value.dtype))


def _like(value: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
    made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    made.copy_(flat.reshape(value.shape))
    return made
