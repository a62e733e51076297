"""A finding of a region about a result of the program has the program's name for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

import checked_backend as cb
from tests.support import faults
from tests.support.check_tools import batch, only, wrong_sine


class Losses(NamedTuple):
    total: torch.Tensor
    parts: list[torch.Tensor]


def after_a_graph_break(x: torch.Tensor) -> dict[str, Any]:
    y = x.exp()
    torch._dynamo.graph_break()
    return {"first": y, "second": (y + x).sin()}


@pytest.mark.parametrize(
    ("program", "subject"),
    [
        (lambda x: Losses(x.exp(), [x.tanh(), x.sin()]), "output.parts[1]"),
        (lambda x: {"b": x.exp(), "a": {"c": x.sin()}}, "output[a][c]"),
        (after_a_graph_break, "output[second]"),
    ],
)
def test_it_is_named(program: Callable[..., Any], subject: str) -> None:
    report = cb.check(program, (batch(),), compiler=wrong_sine)
    assert only(report).subject == subject
    assert f"logic, {subject}" in str(report)


def test_a_region_that_runs_twice_keeps_its_own_names() -> None:
    def layer(x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return x.sin()

    assert only(cb.check(lambda x: {"twice": layer(layer(x))}, (batch(),), compiler=wrong_sine)).subject == "output[0]"


def test_detection_limits_are_told_under_the_programs_names() -> None:
    def program(x: torch.Tensor) -> dict[str, torch.Tensor]:
        first, second = x.exp() + x, (x @ x).sum(0)
        return {"b": second, "a": first}

    less_precise = faults.every_output(lambda output: output * (1 + 2e-7))
    limits = cb.check(program, (torch.randn(16, 16),), compiler=less_precise).coverage.detection_limit
    assert set(limits) == {"output[a]", "output[b]"}
