"""What the exception that ended a program says of the compiled program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from checked_backend.errors import CheckedBackendError
from checked_backend.findings import Finding, Skip
from checked_backend.program.watch import how_it_ended
from tests.support.region_tools import checked, gathered


def raised_by(program: Callable[[], object]) -> Exception:
    """The exception of a program whose regions are checked."""
    raised: list[Exception] = []

    def run() -> None:
        try:
            program()
        except Exception as error:
            raised.append(error)

    gathered(run)
    (error,) = raised
    return error


def between(compile_region: Callable[..., Any]) -> object:
    """Differentiate one result of a region by another."""
    first, second = torch.nn.Linear(4, 3), torch.nn.Linear(3, 2)

    def both(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        latent = first(x).tanh()
        return latent, second(latent)

    latent, out = compile_region(both)(torch.randn(5, 4))
    return torch.autograd.grad(out.sum() + 1, latent)


def twice() -> None:
    x = torch.randn(5, 4, requires_grad=True)
    (gradient,) = torch.autograd.grad(checked(torch.nn.Linear(4, 3), "aot_eager")(x).tanh().sum(), x, create_graph=True)
    gradient.square().sum().backward()


def test_second_derivatives_are_eagers_alone() -> None:
    found = how_it_ended(raised_by(twice))
    assert isinstance(found, Finding)
    assert found.detail == "crash.differentiating"


def reraised(by: str) -> None:
    try:
        twice()
    except RuntimeError as error:
        if by == "of another kind":
            raise ValueError("step 0 failed") from error
        if by == "without a cause":
            raise ValueError("step 0 failed") from None
        raise error from error


@pytest.mark.parametrize("by", ["of another kind", "without a cause", "itself"])
def test_an_exception_that_the_program_makes_of_another_is_told_as_that(by: str) -> None:
    found = how_it_ended(raised_by(lambda: reraised(by)))
    assert isinstance(found, Finding)
    assert found.detail == "crash.differentiating"
    assert "gradient.square().sum().backward()" in str(found.source)


def breaks() -> None:
    torch._dynamo.graph_break()


PROGRAMS: dict[str, Callable[[], object]] = {
    "a gradient between two results of an unchecked region": lambda: between(
        lambda function: torch.compile(function, backend="aot_eager")
    ),
    "that of a checked region": lambda: between(lambda function: checked(function, "aot_eager")),
    "Dynamo": lambda: torch.compile(lambda x: (breaks(), x + 1), backend="aot_eager", fullgraph=True)(torch.ones(2)),
    "autograd": lambda: torch.ones(2).sum().backward(),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_where_nobody_asked_nothing_is_known(name: str) -> None:
    skip = how_it_ended(raised_by(PROGRAMS[name]))
    assert isinstance(skip, Skip)
    assert skip.matters
    assert "nothing is known" in skip.reason
    assert "test_ended.py" in skip.subject


def made_of_its_own() -> None:
    error = ValueError("step 0 failed")
    error.__cause__ = KeyError("a")
    error.__cause__.__cause__ = error  # a circle
    raise error


OWN: dict[str, Callable[[], object]] = {
    "its own": lambda: int("one"),
    "made of its own": made_of_its_own,
    "an operator's": lambda: torch.ones(2) @ torch.ones(3),
    "a region's, as eager's": lambda: checked(lambda x, i: x[i].sin(), "aot_eager")(torch.ones(2), torch.tensor([5])),
}


@pytest.mark.parametrize("name", OWN)
def test_what_is_the_programs_own_is_not_told(name: str) -> None:
    assert how_it_ended(raised_by(OWN[name])) is None


def test_what_is_no_error_of_the_program() -> None:
    assert how_it_ended(None) is None
    assert how_it_ended(KeyboardInterrupt()) is None
    assert how_it_ended(CheckedBackendError("ours")) is None
