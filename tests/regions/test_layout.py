"""Findings about layout alone: the values agree, so the program goes on, with one warning."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import checked_backend as cb
from checked_backend.errors import DivergenceWarning, OptionError
from checked_backend.findings import Severity
from tests.support import faults
from tests.support.region_tools import agreed, checked, found, gathered, warned


def two(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x.cos(), x.sin()


def x() -> torch.Tensor:
    return torch.randn(4, 6)


def with_other_strides(then: faults.Compiler | None = None) -> faults.Compiler:
    """A compiler whose first result has other strides, and is made by another wrong compiler."""

    def compiler(gm: Any, example_inputs: Any) -> Callable[..., Any]:
        run = (then or faults.clean())(gm, example_inputs)

        def call(*args: Any) -> Any:
            first, *rest = run(*args)
            return (faults.restrided(first), *rest)

        return call

    return compiler


@pytest.mark.parametrize("policy", ["raise", "warn", "fallback"])
def test_other_strides_are_warned_of_once_and_the_program_goes_on(policy: str) -> None:
    compiled = checked(two, with_other_strides(), on_divergence=policy)
    results: list[torch.Tensor] = []
    [text] = warned(lambda: results.extend(compiled(x())[0] for _ in range(3)))
    assert text.startswith("values agree; 1 output has other strides than in eager.\n")
    assert "output[0]: (6, 1) in eager, (1, 4) compiled; your line: tests/regions/test_layout.py:" in text
    assert ".view()" in text
    assert ".contiguous()" in text
    assert [result.stride() for result in results] == [(1, 4)] * 3  # the compiled program's, with every policy


def test_what_is_recorded_is_not_warned_of_and_the_session_passes() -> None:
    compiled = checked(two, with_other_strides())
    report = gathered(lambda: [compiled(x()) for _ in range(2)])
    assert found(report) == {("structure.stride", "output[0]")}
    assert str(report).startswith("PASS: values agree; 1 output has other strides than in eager (4 outputs")
    assert "Warning 1 of 1: structure.stride, output[0]" in " ".join(report.to_text(verbose=True).split())
    again = cb.Report.from_json(report.to_json())
    assert [finding.severity for finding in again.findings] == [Severity.WARNING]
    assert again.verdict is report.verdict is cb.Verdict.PASS


def test_values_are_checked_on() -> None:
    compiled = checked(two, with_other_strides(faults.only_in_call(3, faults.wrong_value(1))), on_divergence="raise")
    with pytest.warns(DivergenceWarning, match="values agree"):
        compiled(x())
    compiled(x())
    with pytest.raises(cb.DivergenceError) as caught:
        compiled(x())
    assert {finding.subject for finding in caught.value.report.findings if finding.fails} == {"output[1]"}


def test_layout_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHECKED_BACKEND_LAYOUT", "raise")
    with pytest.raises(cb.DivergenceError, match="other strides"):
        checked(two, with_other_strides(), on_divergence="raise")(x())
    monkeypatch.setenv("CHECKED_BACKEND_LAYOUT", "ignore")  # `check` fails for layout all the same
    report = cb.check(two, (x(),), compiler=with_other_strides())
    assert report.verdict is cb.Verdict.FAIL
    assert str(report).startswith("FAIL: values agree; 1 output has other strides than in eager")
    monkeypatch.setenv("CHECKED_BACKEND_LAYOUT", "sometimes")
    with pytest.raises(OptionError, match="CHECKED_BACKEND_LAYOUT got 'sometimes'"):
        torch.compile(two, backend="numcheck")(x())


def test_a_gradient_that_is_lost_is_more_than_layout() -> None:
    detached = faults.spoiled_output(torch.Tensor.detach)
    with pytest.raises(cb.DivergenceError, match="no gradient flows back through it, and through eager's one does"):
        checked(two, detached, on_divergence="raise")(x().requires_grad_())
    requiring = faults.spoiled_output(lambda result: result.requires_grad_())
    with pytest.warns(DivergenceWarning, match="1 output differs from eager in requires_grad"):
        checked(two, requiring, on_divergence="raise")(x())


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo asks for it
@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_an_input_with_gaps_that_is_written_to_has_its_strides_in_eager_too(compiler: str) -> None:
    def run() -> None:
        base = torch.randn(4, 3, requires_grad=True)
        h = torch.empty_strided((4, 3), (6, 2)).copy_(base)
        checked(lambda h: h.mul_(3.0).sin(), compiler)(h).sum().backward()
        assert torch.equal(base.grad, 3 * (3 * base.detach()).cos())

    assert agreed(gathered(run))
