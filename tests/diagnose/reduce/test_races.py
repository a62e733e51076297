"""Writes of several values to one place, of which nothing says which one stays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from checked_backend.diagnose.reduce.passes.details import simplify_values
from checked_backend.diagnose.reduce.races import has_race
from checked_backend.regions.graph_case import GraphCase
from tests.support.reduce_tools import problem_where, program_of, targets

aten = torch.ops.aten


def put(x: Tensor, at: Tensor, values: Tensor) -> tuple[Tensor, ...]:
    return (torch.index_put(x, [at], values),)


def in_place(x: Tensor, at: Tensor, values: Tensor) -> tuple[Tensor, ...]:
    return (x.clone().index_put_((at,), values),)


def added(x: Tensor, at: Tensor, values: Tensor) -> tuple[Tensor, ...]:
    return (torch.index_put(x, [at], values, accumulate=True),)


def scattered(x: Tensor, at: Tensor, values: Tensor) -> tuple[Tensor, ...]:
    return (aten.scatter.src(x, 0, at[:, None].expand(-1, 2), values),)


def copied(x: Tensor, at: Tensor, values: Tensor) -> tuple[Tensor, ...]:
    return (x.index_copy(0, at, values),)


ROWS = torch.arange(4.0).reshape(2, 2)
TWICE = torch.tensor([1, 1])


@pytest.mark.parametrize("function", [put, in_place, scattered, copied])
def test_rows_written_to_one_place_race(function: Callable[..., Any]) -> None:
    x = torch.zeros(3, 2)
    assert has_race(program_of(function, x, TWICE, ROWS))
    assert has_race(program_of(function, x, torch.tensor([-2, 1]), ROWS)) is (function in (put, in_place))  # or refused
    assert not has_race(program_of(function, x, torch.tensor([0, 1]), ROWS))
    assert not has_race(program_of(function, x, TWICE, torch.ones(2, 2)))  # the same row twice


def test_sums_do_not_race() -> None:
    assert not has_race(program_of(added, torch.zeros(3, 2), TWICE, ROWS))


def test_a_reduction_does_not_end_at_a_race() -> None:
    def wrong(case: GraphCase) -> bool:
        return "index_put" in str(targets(case)) and case.inputs[2].unique().numel() > 2

    problem = problem_where(wrong, program_of(put, torch.randn(3, 2), torch.tensor([2, 0]), torch.randn(2, 2)))
    simplify_values(problem)
    x, at, _ = problem.best.case.inputs
    assert torch.equal(x, torch.zeros(3, 2))  # what could be made simpler was
    assert at.unique().numel() == 2
    assert not has_race(problem.best)
