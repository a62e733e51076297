"""Simpler values: zeros, ones, a range, small whole numbers, seeded random numbers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import fx

from checked_backend.diagnose.reduce.failing_case import FailingCase, record_values
from checked_backend.diagnose.reduce.problem import Problem
from checked_backend.graphs.nodes import outputs_of
from checked_backend.scripts.values import LITERAL_ELEMENTS, form_of, ramp, seeded


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
