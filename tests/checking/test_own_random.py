"""Random numbers that the compiler draws itself: structure, seeds, the masks of forward and backward pass."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import checked_backend as cb
from checked_backend.checking import own_random as module
from checked_backend.checking.own_random import compare_own_random
from checked_backend.report.ledger import Ledger
from tests.support.check_tools import agreed, batch, differentiated, found, program_of, skips
from tests.support.raising import raising


def compared(function: Callable[..., Any], x: torch.Tensor, compiled: Callable[..., Any]) -> list[cb.Finding]:
    """What is found where a program is compiled to another one."""
    torch.manual_seed(0)
    return compare_own_random(program_of(function, x), lambda _: compiled, Ledger())


def dropped(share: float, x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.dropout(x, share)


X = torch.ones(40, 60)


def test_dropout_of_another_probability_is_found() -> None:
    (finding,) = compared(partial(dropped, 0.2), X, partial(dropped, 0.18))
    assert (finding.kind, finding.detail, finding.subject) == (cb.Kind.RNG, "rng.distribution", "output[0]")
    assert "fallback_random=False" in finding.message


def test_numbers_that_no_seed_changes_are_found() -> None:
    fixed = torch.randn(40, 60, generator=torch.Generator().manual_seed(5))
    (finding,) = compared(torch.randn_like, X, lambda x: fixed.clone())
    assert finding.detail == "rng.seed"


def test_a_backward_pass_that_drops_other_elements_is_found() -> None:
    # the backward pass draws a mask of its own
    forgetful = differentiated(partial(dropped, 0.2), partial(dropped, 0.2))
    (finding,) = compared(partial(dropped, 0.2), batch(6, 8, grad=True), forgetful)
    assert (finding.detail, finding.subject) == ("rng.mask", "grad[x]")


CLEAN: dict[str, Callable[[torch.Tensor], Any]] = {
    "dropout": partial(dropped, 0.2),
    "whole channels": lambda x: torch.nn.functional.dropout1d(x, 0.5),
    "a mask": lambda x: torch.rand_like(x) < 0.5,
    "beside what is not drawn": lambda x: (x * 3.1, torch.rand_like(x) * 1e-9 + x),
    "shapes that are drawn": lambda x: x[torch.rand(40) < 0.5],
    "in half precision": lambda x: torch.randn_like(x).bfloat16().softmax(-1),
}


@pytest.mark.parametrize("name", CLEAN)
def test_the_same_distribution_is_not_reported(name: str) -> None:
    assert not compared(CLEAN[name], X, CLEAN[name])


@pytest.mark.parametrize("seed", range(2))
def test_a_right_network_is_not_reported(seed: int) -> None:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3))
    program = program_of(model, batch(5, 6))
    assert not compare_own_random(program, partial(torch.compile, backend="aot_eager"), Ledger())


def test_a_wrong_dtype_is_a_finding_of_structure() -> None:
    (finding,) = compared(torch.randn_like, X, lambda x: torch.randn_like(x).double())
    assert (finding.kind, finding.detail) == (cb.Kind.STRUCTURE, "structure.dtype")
    assert "as without a check" in finding.message


def test_what_raises_only_there_is_a_crash() -> None:
    (finding,) = compared(torch.randn_like, X, raising(RuntimeError("no generator")))
    assert finding.kind is cb.Kind.CRASH


def test_too_few_runs_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_SECONDS", 0.0)
    ledger = Ledger()
    assert not compare_own_random(program_of(torch.randn_like, X), lambda function: function, ledger)
    assert "20 runs would take too long" in ledger.coverage().skipped[0].reason


def test_the_random_state_and_the_users_seed_stay() -> None:
    before = torch.get_rng_state()
    compare_own_random(program_of(torch.randn_like, X), lambda function: function, Ledger())
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.slow
@pytest.mark.inductor
def test_inductor_with_its_own_random_numbers_is_compared() -> None:
    report = agreed(cb.check(nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2)), (batch(32, 8),)))
    assert report.coverage.checked["runs with the compiler's own random numbers"] >= 20


@pytest.mark.slow
@pytest.mark.inductor
def test_a_dtype_that_only_inductors_own_random_operators_get_wrong() -> None:
    mean, spread = torch.zeros(10), torch.ones(10, dtype=torch.float64)
    report = cb.check(torch.normal, (mean, spread))
    assert {detail for detail, _ in found(report)} <= {"structure.dtype"}
    assert "own random" in " ".join(report.to_text(verbose=True).split()) or skips(report)
