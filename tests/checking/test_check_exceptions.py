"""`check` on programs that raise, on one side or on both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import checked_backend as cb
from tests.support.check_tools import Counting, Net, agreed, batch, differentiated, found, only, skips, undecided
from tests.support.raising import raising


def by_type(x: torch.Tensor) -> torch.Tensor:
    raise KeyError("no such key")


def after_a_region(x: torch.Tensor) -> torch.Tensor:
    if x.sin().sum() < 10:
        raise ValueError("too small")
    return x


@pytest.mark.parametrize("function", [by_type, lambda x: x.view(7), lambda x: x[10], after_a_region])
def test_where_both_raise_there_is_nothing_to_pass(function: Callable[..., Any]) -> None:
    report = cb.check(function, (batch(3),), compiler="eager")
    assert not report.findings
    assert "both raise" in str(report.coverage.notes)
    assert "results: eager itself raises " in undecided(report)


def test_a_step_that_raises_on_both_sides_ends_the_check_without_a_pass() -> None:
    class Ends(Counting):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.calls == 2:
                raise ValueError("enough")
            return super().forward(x)

    agreed(cb.check(Ends(), (batch(3),), compiler="eager", iterations=2))
    report = cb.check(Ends(), (batch(3),), compiler="eager", iterations=5)
    assert "eager itself raises ValueError: enough" in undecided(report)


@pytest.mark.skipif(torch.__version__.startswith("2.11."), reason="torch 2.11 loses the exception, which is a finding")
def test_a_backward_pass_that_raises_in_eager_too_is_no_pass() -> None:
    refuses = differentiated(lambda x: x * 2, raising(ValueError("no gradient")))
    report = cb.check(lambda x: refuses(x.sin()), (batch(3, grad=True),), compiler="eager")
    assert report.verdict is cb.Verdict.INCONCLUSIVE or report.findings
    assert "gradients: eager has none: ValueError: no gradient" in skips(report)


@pytest.mark.parametrize(("when", "detail"), [(True, "crash.running"), (False, "exception.missing")])
def test_only_one_side_raises(when: bool, detail: str) -> None:
    def raises(x: torch.Tensor) -> torch.Tensor:
        if when:
            with torch._dynamo.error_on_graph_break(True):
                torch._dynamo.graph_break()
        elif not torch.compiler.is_compiling():
            raise ValueError("only here")
        return x * 2

    finding = only(cb.check(raises, (batch(3),), compiler="eager"))
    assert (finding.detail, finding.subject) == (detail, "exception")
    assert (finding.expected == "no exception") is when


def test_different_exceptions() -> None:
    def raises(x: torch.Tensor) -> torch.Tensor:
        with torch._dynamo.error_on_graph_break(True):
            torch._dynamo.graph_break()
        raise ValueError("another")

    finding = only(cb.check(raises, (batch(3),), compiler="eager"))
    assert (finding.detail, finding.expected) == ("exception.type", "ValueError: another")


def test_where_no_output_requires_grad_both_must_refuse() -> None:
    x = batch(3, grad=True)
    agreed(cb.check(lambda x: x.detach() * 2, (x,), compiler="aot_eager"), exceptions=1)

    def differs(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if torch.compiler.is_compiling() else x.detach() * 2

    details = {detail for detail, _ in found(cb.check(differs, (x,), compiler="eager"))}
    assert details == {"exception.missing", "structure.requires_grad"}


def test_an_exception_in_the_checker_is_never_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    for place in ("backward.draw", "compare_runs.compare_parts", "compare_runs.decide", "program.output_leaves"):
        with monkeypatch.context() as patch:
            patch.setattr(f"checked_backend.checking.{place}", raising(RuntimeError("the checker is broken")))
            with pytest.raises((RuntimeError, cb.CheckedBackendError), match="the checker is broken"):
                cb.check(Net(), (batch(),), compiler="eager")
