"""A crash that names its own cause: a custom operator's register_fake says something else than its kernel does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import checked_backend as cb
from checked_backend.diagnose.diagnosis import Diagnosis
from checked_backend.diagnose.localize.traced import wrong_metadata
from checked_backend.regions.failure import Failure
from tests.support import faults
from tests.support.locate_tools import failed


@torch.library.custom_op("test_traced::turned", mutates_args=())
def turned(x: Tensor) -> Tensor:
    """Returns columns that lie in memory one after the other."""
    return x.t().contiguous().t() * 2


@turned.register_fake
def _rows(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("test_traced::widened", mutates_args=())
def widened(x: Tensor) -> Tensor:
    return x.double()


@widened.register_fake
def _as_given(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def function(x: Tensor, *, right: bool) -> Tensor:
    return (x * 2 if right else turned(x)).sin() + 1


def wide(x: Tensor, *, right: bool) -> Tensor:
    return (x.double() if right else torch.ops.test_traced.widened(x)).sin() + 1


def _failed(
    message: str, monkeypatch: pytest.MonkeyPatch, *, right: bool = False, function: Callable[..., Tensor] = function
) -> tuple[Failure, Sequence[cb.Finding]]:
    @faults.runs
    def compiler(_forward: Callable[..., Any], *args: Any) -> Any:
        if message:
            raise AssertionError(message)
        return (torch.zeros(4, 8, dtype=torch.float64),)

    return failed(monkeypatch, function, compiler, torch.randn(4, 8), right=right)


STRIDES = "expected size 4==4, stride 1==8 at dim=0\nError in op: torch.ops.test_traced.turned.default"


def test_the_operator_and_the_line_of_its_register_fake_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    failure, findings = _failed(STRIDES, monkeypatch)
    traced = wrong_metadata(failure, findings)
    assert (traced.op, traced.node) == ("test_traced.turned.default", "turned")
    assert "function: return (x * 2 if right else turned(x)).sin() + 1" in str(traced.source)
    [finding] = Diagnosis.of_traced(traced).added_to_all(findings)
    assert f"test_traced.py:{_rows.__code__.co_firstlineno})" in finding.at_fault
    text = " ".join(str(cb.Report((finding,), cb.Coverage())).split())
    assert "at fault the register_fake of the custom operator test_traced.turned.default" in text
    assert "for a custom operator make its register_fake and its schema say what its kernel does" in text
    assert "torch.compiler.disable" not in text


@pytest.mark.parametrize(
    ("message", "right"), [("out of memory", False), (STRIDES.replace("turned", "other"), False), (STRIDES, True)]
)
def test_another_crash_and_one_without_wrong_metadata_are_looked_into_as_usual(
    message: str, right: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert wrong_metadata(*_failed(message, monkeypatch, right=right)) is None


DTYPE = "Expected out tensor to have dtype double, but got float instead"


@pytest.mark.parametrize("message", [DTYPE, ""])
def test_wrong_values_and_a_refused_dtype_come_from_a_register_fake_that_says_another_dtype(
    message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    traced = wrong_metadata(*_failed(message, monkeypatch, function=wide))
    assert (traced.op, traced.detail) == ("test_traced.widened.default", "structure.dtype")
    assert f"test_traced.py:{_as_given.__code__.co_firstlineno})" in traced.at_fault


@pytest.mark.parametrize(("message", "right"), [(DTYPE, True), ("", True), ("out of memory", False)])
def test_a_right_dtype_explains_nothing_and_no_other_crash_comes_from_a_wrong_one(
    message: str, right: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert wrong_metadata(*_failed(message, monkeypatch, function=wide, right=right)) is None
