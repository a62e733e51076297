"""An error in one call of a region that draws random numbers is an error: another thread is named on evidence only."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import checked_backend as cb
from checked_backend.errors import DivergenceWarning
from tests.support import faults
from tests.support.region_tools import checked, found, gathered, meanwhile

PROGRAMS: dict[str, Callable[[torch.Tensor], tuple[torch.Tensor, ...]]] = {
    "dropout": lambda x: (F.dropout(x, 0.5).cumsum(0), torch.tanh(x)),
    "rand": lambda x: (x + torch.rand(8, 6), torch.tanh(x)),
    "bernoulli": lambda x: (torch.bernoulli(torch.sigmoid(x)) * x, torch.tanh(x)),
}

SPOILS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "scaled": lambda tensor: tensor * 1e6,
    "slightly": lambda tensor: tensor * 1.01,
    "NaN": faults.with_nan,
    "zeroed": torch.zeros_like,
}


def x() -> torch.Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(1))


@contextmanager
def drawing() -> Iterator[None]:
    """A thread draws random numbers all the time, also during calls that take less than the usual 5 ms."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    try:
        with meanwhile(lambda: torch.rand(3)):
            yield
    finally:
        sys.setswitchinterval(interval)


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("name", "spoil", "at"),
    [(name, spoil, (one + other) % 2) for one, name in enumerate(PROGRAMS) for other, spoil in enumerate(SPOILS)],
)
def test_an_error_in_one_call_beside_random_numbers_fails(name: str, spoil: str, at: int) -> None:
    compiled = checked(PROGRAMS[name], faults.only_in_call(3, faults.spoiled_output(SPOILS[spoil], at)))
    with meanwhile():
        report = gathered(lambda: [compiled(x()) for _ in range(4)])
    assert {subject for _, subject in found(report)} == {f"output[{at}]"}, str(report)
    assert not any("another thread" in skip.reason for skip in report.coverage.skipped)


@pytest.mark.parametrize("how", ["python", "aot"])
@pytest.mark.parametrize("name", ["dropout", "rand"])
def test_an_error_in_one_backward_pass_beside_random_numbers_fails(name: str, how: faults.How) -> None:
    spoil = faults.once(3, lambda gradient: gradient * 1e3)
    compiled = checked(PROGRAMS[name], faults.spoiled_gradient("x", spoil, how))

    def train() -> None:
        for _ in range(4):
            first, second = compiled(x().requires_grad_())
            (first.square().sum() + second.sum()).backward()

    report = gathered(train)
    assert {subject for _, subject in found(report)} == {"grad[x]"}, str(report)


def test_a_value_that_is_wrong_now_and_then_is_not_said_to_be_drawn() -> None:
    def now_and_then(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        numbers = itertools.count(1)

        def spoil(tensor: torch.Tensor) -> torch.Tensor:
            return faults.one_element_changed(tensor) if (number := next(numbers)) >= 5 and number % 2 else tensor

        return faults.spoiled_output(spoil, how="aot")(gm, inputs)

    compiled = checked(nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.Linear(16, 2)), now_and_then)
    report = gathered(lambda: [compiled(torch.randn(6, 8)).square().mean().backward() for _ in range(8)])
    assert found(report) == {("logic.this_compilation", "output[0]")}


def test_an_error_in_one_call_is_answered_as_asked() -> None:
    def wrong() -> faults.Compiler:
        return faults.only_in_call(3, faults.spoiled_output(SPOILS["scaled"]))

    def run(policy: str) -> list[torch.Tensor]:
        compiled = checked(PROGRAMS["dropout"], wrong(), on_divergence=policy)
        return [compiled(x())[0] for _ in range(4)]

    with pytest.raises(cb.DivergenceError, match=r"output\[0\]"):
        run("raise")
    torch._dynamo.reset()
    with pytest.warns(DivergenceWarning, match=r"output\[0\]"):
        run("warn")
    torch._dynamo.reset()
    assert all(result.abs().max() < 1e3 for result in run("fallback"))


def test_a_random_state_left_otherwise_in_one_call_fails() -> None:
    compiled = checked(torch.tanh, faults.only_in_call(3, faults.too_many_random_numbers()))
    with meanwhile():
        report = gathered(lambda: [compiled(x()) for _ in range(4)])
    assert found(report) == {("rng.state", "rng state")}


def test_a_thread_that_draws_is_named_and_what_it_may_explain_is_no_pass() -> None:
    with drawing():
        clean = checked(PROGRAMS["dropout"], faults.clean())
        assert not found(gathered(lambda: [clean(x()) for _ in range(10)]))
        compiled = checked(PROGRAMS["dropout"], faults.only_in_call(1, faults.spoiled_output(SPOILS["scaled"])))
        report = gathered(lambda: [compiled(x()) for _ in range(4)])
    named = [skip.subject for skip in report.coverage.skipped if skip.matters and "another thread" in skip.reason]
    assert "output[0]" in (*named, *(finding.subject for finding in report.findings)), str(report)
    assert report.verdict is not cb.Verdict.PASS


def test_a_compiler_that_draws_by_another_operator_is_not_said_to_round() -> None:
    by_rand = faults.instead(lambda x: x * (torch.rand(8, 6) > 0.5) / 0.5)
    report = gathered(lambda: checked(lambda x: F.dropout(x, 0.5), by_rand)(x()))
    assert found(report) == {("rng.stream", "output[0]")}, str(report)
    assert "draws otherwise than eager" in report.findings[0].message
    assert "aten.bernoulli_" in report.findings[0].message
