"""Kernels that are wrong for sizes near a tile's, and how far a check goes to find them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import checked_backend as cb
from checked_backend.checking import sizes as module
from checked_backend.checking.check import Effort
from tests.support.check_tools import agreed, batch, rounding_otherwise, skips, wrong_where

WRONG: dict[str, Callable[[int], bool]] = {
    "over 64": lambda size: size > 64,
    "15 modulo 16": lambda size: size % 16 == 15,
    "1024": lambda size: size == 1024,
    "from 200 on": lambda size: size >= 200,
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", WRONG)
def test_a_kernel_that_is_wrong_for_some_large_sizes_is_found(name: str) -> None:
    wrong = wrong_where(lambda tensors: WRONG[name](tensors[0].shape[0]))
    report = cb.check(lambda x: x * 2, (batch(6),), compiler=wrong, dynamic=True)
    assert report.verdict is cb.Verdict.FAIL
    assert all(finding.evidence["failing_calls"].startswith("with x ") for finding in report.findings)


@pytest.mark.more
def test_each_dimension_varies_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TILE_SIZES", (17, 255, 65))
    wrong = wrong_where(lambda tensors: tensors[0].shape[0] == 6 and tensors[0].shape[1] > 64)
    (finding,) = cb.check(lambda x: x * 2, (batch(6, 5),), compiler=wrong, dynamic=True).findings
    assert finding.evidence["failing_calls"].startswith("with x 6x255")


@pytest.mark.more
@pytest.mark.parametrize("compiler", [rounding_otherwise, "aot_eager"])
def test_a_clean_program_agrees_and_the_sizes_are_told(
    compiler: Callable[..., object] | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "TILE_SIZES", (255, 15, 16, 17, 1024))
    model = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.LayerNorm(8), torch.nn.GELU())
    report = agreed(cb.check(model, (batch(6, 5),), compiler=compiler, dynamic=True))
    told = "sizes of input.shape[0] that were tried around powers of two: 15, 16, 17, 255, 1024"
    assert told in report.coverage.notes


def test_sizes_without_memory_or_time_are_left_out_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_BYTES", 1000 * 4)
    report = agreed(cb.check(lambda x: x.sin(), (batch(6),), compiler="eager", dynamic=True))
    assert "sizes of x.shape[0]: left out 511, 512, 513, 777, 1023, 1024, 1025, 2047" in skips(report)
    monkeypatch.setattr(module, "MOST_SECONDS", -1.0)
    report = agreed(cb.check(lambda x: x.sin(), (batch(6),), compiler="eager", dynamic=True))
    assert "sizes of x.shape[0]: left out 15, 16, 17, 31" in skips(report)


def test_a_dimension_of_which_eager_refuses_other_sizes_is_left_soon() -> None:
    def picky(x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] > 12:
            raise ValueError("too long")
        return x * 2

    report = agreed(cb.check(picky, (batch(6),), compiler="eager", dynamic=True))
    assert skips(report).count("too long") <= 4
    assert "eager refuses the first of them" in skips(report)


def test_a_check_of_less_effort_makes_few_calls_of_other_sizes_for_each_program_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "TILE_SIZES", (255, 65, 31, 129))
    tried = set()
    for rows in (5, 6, 9):
        given, effort = (batch(rows, 4),), Effort(sizes=3, tiles=2)
        report = agreed(cb.check(lambda x: x * 2, given, compiler="eager", dynamic=True, effort=effort))
        assert report.coverage.checked["program runs"] == 1 + 3 + 2
        assert "only 3 of" in skips(report)
        assert "powers of two: only 2 of" in skips(report)
        tried.add(tuple(note for note in report.coverage.notes if "around powers of two" in note))
    assert len(tried) == 3


def test_a_large_call_at_16_bits_is_expected_to_take_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TILE_SIZES", (1024,))
    monkeypatch.setattr(module, "MOST_BYTES", 40_000)
    for dtype in (torch.float32, torch.bfloat16):
        report = agreed(cb.check(lambda x: x.neg(), (batch(6).to(dtype),), compiler="eager", dynamic=True))
        assert ("left out 1024" in skips(report)) is (dtype is torch.bfloat16)
