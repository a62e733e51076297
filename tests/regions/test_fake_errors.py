"""A custom operator whose register_fake is missing, or raises while its backward pass is traced, is named at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import checked_backend as cb
from checked_backend._torch.fake_tensors import FakeTensorMode
from checked_backend.regions.call_findings import FakeError
from tests.support.raising import raising
from tests.support.region_tools import gathered


def _operator(name: str, fake: Callable[..., Any] | None) -> Callable[..., Any]:
    """An operator whose backward pass is another custom operator, with a given fake kernel."""

    @torch.library.custom_op(f"test_fake_errors::{name}_backward", mutates_args=())
    def gradient(gradient: Tensor, x: Tensor) -> Tensor:
        return gradient * x.cos()

    @torch.library.custom_op(f"test_fake_errors::{name}", mutates_args=())
    def sine(x: Tensor) -> Tensor:
        return x.sin()

    def backward(ctx: Any, arrived: Tensor) -> Any:
        return gradient(arrived, ctx.saved_tensors[0])  # the backward pass calls it

    if fake is not None:
        gradient.register_fake(fake)
    sine.register_fake(torch.empty_like)
    sine.register_autograd(backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]))
    return sine


def _branches(gradient: Tensor, x: Tensor) -> Tensor:
    return torch.empty_like(gradient) if x.sum() > 0 else torch.empty_like(x)


def _misspelt(gradient: Tensor, x: Tensor) -> Tensor:
    return gradient.new_emptyy(x.shape)


missing, branches = _operator("missing", None), _operator("branches", _branches)
misspelt, right = _operator("misspelt", _misspelt), _operator("right", lambda gradient, x: torch.empty_like(gradient))


def _report(operator: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> cb.Report:
    never = raising(AssertionError("nothing is to be searched"))
    monkeypatch.setattr("checked_backend.backends.investigate", never)
    monkeypatch.setattr("checked_backend.regions.unsupported.nothing_compiles", never)
    options = {"on_divergence": "record", "compiler": "aot_eager"}
    compiled = torch.compile(lambda x: operator(x * 2) + 1, backend="numcheck", options=options, fullgraph=True)
    return gathered(lambda: compiled(torch.ones(3, requires_grad=True)).sum().backward())


def _line(function: Callable[..., Any]) -> str:
    return f"{__file__}:{function.__code__.co_firstlineno + 1})"


@pytest.mark.parametrize(
    ("operator", "name", "fault"),
    [
        (missing, "missing", ", which has no register_fake"),
        (branches, "branches", f" ({_line(_branches)}, which raises GuardOnDataDependentSymNode"),
        (misspelt, "misspelt", f" ({_line(_misspelt)}, which raises AttributeError"),
    ],
)
def test_the_operator_its_register_fake_and_the_line_are_named_without_a_search(
    operator: Callable[..., Any], name: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = _report(operator, monkeypatch)
    [finding] = report.findings
    assert (finding.detail, finding.op) == ("crash.fake", f"test_fake_errors.{name}_backward.default")
    assert finding.at_fault.startswith(("the custom operator", "the register_fake of the custom operator"))
    assert fault in finding.at_fault
    assert "return gradient(arrived, ctx.saved_tensors[0])" in str(finding.source)
    text = " ".join(str(report).split())
    assert "Write it with torch.library.register_fake" in text
    assert "report it" not in text


def test_its_clean_twin_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    report = _report(right, monkeypatch)
    assert (report.verdict, report.findings) == (cb.Verdict.PASS, ())


def test_a_missing_one_that_dynamo_meets_is_named_by_check() -> None:
    @torch.library.custom_op("test_fake_errors::unknown", mutates_args=())
    def unknown(x: Tensor) -> Tensor:
        return x * 2

    def function(x: Tensor) -> Tensor:
        return unknown(x) + 1  # forward

    [finding] = cb.check(function, (torch.ones(3),), compiler="aot_eager").findings
    assert (finding.detail, finding.op) == ("crash.fake", "test_fake_errors.unknown.default")
    assert "return unknown(x) + 1" in str(finding.source)
    line = unknown._init_fn.__code__.co_firstlineno
    fault = f"the custom operator test_fake_errors.unknown.default ({__file__}:{line}), which has no register_fake"
    assert finding.at_fault == fault


def test_errors_of_torchs_own_operators_are_no_custom_operators() -> None:
    with pytest.raises(RuntimeError) as caught, FakeTensorMode():
        torch.empty(2) @ torch.empty(3)
    assert FakeError.inside(caught.value) is None
