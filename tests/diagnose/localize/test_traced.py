"""A crash that names its own cause: a custom operator's register_fake says something else than its kernel does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx

import checked_backend as cb
from checked_backend.diagnose.diagnosis import Diagnosis
from checked_backend.diagnose.localize.traced import wrong_metadata
from checked_backend.findings import Finding
from checked_backend.regions.failure import Failure
from checked_backend.report import Report


@torch.library.custom_op("test_traced::turned", mutates_args=())
def turned(x: Tensor) -> Tensor:
    """Returns columns that lie in memory one after the other."""
    return x.t().contiguous().t() * 2


@turned.register_fake
def _rows(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def function(x: Tensor, *, right: bool) -> Tensor:
    return (x * 2 if right else turned(x)).sin() + 1


def _failed(message: str, monkeypatch: pytest.MonkeyPatch, *, right: bool = False) -> tuple[Failure, Sequence[Finding]]:
    calls: list[tuple[Failure, Sequence[Finding]]] = []

    def note(failure: Failure, findings: Sequence[Finding]) -> Sequence[Finding]:
        calls.append((failure, findings))
        return findings

    def compiler(_gm: fx.GraphModule, _inputs: Sequence[Any]) -> Callable[..., Any]:
        def run(*_args: Any) -> Any:
            raise AssertionError(message)

        return run

    monkeypatch.setattr("checked_backend.backends.investigate", note)
    options = {"on_divergence": "record", "compiler": compiler}
    with cb.collect():
        torch.compile(function, backend="numcheck", options=options)(torch.randn(4, 8), right=right)
    return calls[0]


STRIDES = "expected size 4==4, stride 1==8 at dim=0\nError in op: torch.ops.test_traced.turned.default"


def test_the_operator_and_the_line_of_its_register_fake_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    failure, findings = _failed(STRIDES, monkeypatch)
    traced = wrong_metadata(failure, findings)
    assert traced is not None
    assert (traced.op, traced.node) == ("test_traced.turned.default", "turned")
    assert "function: return (x * 2 if right else turned(x)).sin() + 1" in str(traced.source)
    [finding] = Diagnosis.of_traced(traced).added_to_all(findings)
    assert f"test_traced.py:{_rows.__code__.co_firstlineno})" in finding.at_fault
    text = " ".join(str(Report((finding,), cb.Coverage())).split())
    assert "at fault the register_fake of the custom operator test_traced.turned.default" in text
    assert "For a custom operator make its register_fake and its schema say what its kernel does" in text
    assert "torch.compiler.disable" not in text


@pytest.mark.parametrize(
    ("message", "right"), [("out of memory", False), (STRIDES.replace("turned", "other"), False), (STRIDES, True)]
)
def test_another_crash_and_one_without_wrong_metadata_are_looked_into_as_usual(
    message: str, right: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert wrong_metadata(*_failed(message, monkeypatch, right=right)) is None
