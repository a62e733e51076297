"""Simpler calls: common dtypes, optional tensors left out, round numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from checked_backend._torch.operators import OpOverload
from checked_backend.diagnose.reduce.failing_case import Draft, FailingCase, call_nodes
from checked_backend.diagnose.reduce.problem import Problem, constants_of

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
