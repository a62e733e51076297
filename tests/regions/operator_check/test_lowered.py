"""What a region was lowered to, run in float64: it shows what comes before code generation, without a compile."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import checked_backend as cb
from checked_backend._torch.caches import without_compile_caches
from checked_backend.regions.operator_check.check import OperatorCheck
from checked_backend.regions.operator_check.lowered import LoweredRegion
from checked_backend.regions.operator_check.step import OperatorStep
from tests.support.planted import Fault, Table, in_half_precision, planted, scaled
from tests.support.region_tools import agreed, checked, gathered

pytestmark = [pytest.mark.inductor]


def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = torch.tanh(F.gelu(x @ w))
    return torch.softmax(y @ w.t(), -1) * y.sum(1, keepdim=True)


def inputs() -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(size, dtype=torch.bfloat16).requires_grad_() for size in ((16, 32), (32, 24)))


def report_of(
    function: Callable[..., torch.Tensor], *args: Any, calls: int = 1, dynamic: bool | None = None
) -> cb.Report:
    compiled = checked(function, "inductor", dynamic=dynamic)

    def run() -> None:
        for _ in range(calls):
            loss = compiled(*args).float().sum()
            if loss.requires_grad:
                loss.backward()

    return gathered(run)


@pytest.fixture
def no_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail where what comes before code generation is compiled once more, with inner tensors returned."""

    def fail(*_: object) -> None:
        raise AssertionError("a probe is compiled")

    monkeypatch.setattr(OperatorCheck, "_check_probe", fail)


def dropped_out(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.dropout(torch.tanh(x @ w), 0.3) @ w.t()


def written(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[2:5] = torch.tanh(y[1:4] * 2)
    return y @ w


def mixed(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = (x @ w).float()
    return torch.sigmoid(y / y.std(1, keepdim=True)) * torch.arange(24)


def of_every_second(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    scores, places = (x @ w).topk(3)
    return scores * places + torch.where(scores > 0, scores, torch.zeros((), dtype=x.dtype))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("function", [program, dropped_out, written, mixed, of_every_second])
@pytest.mark.usefixtures("no_probe")
def test_a_clean_program_needs_no_probe(function: Callable[..., torch.Tensor], dynamic: bool) -> None:
    report = report_of(function, *inputs(), calls=4, dynamic=dynamic)
    assert agreed(report)
    assert not report.coverage.skipped
    assert report.coverage.checked["operators"] > 3


@pytest.mark.usefixtures("no_probe")
def test_without_gradients_and_with_what_a_module_holds() -> None:
    model = nn.Sequential(nn.Linear(24, 32), nn.BatchNorm1d(32), nn.GELU(), nn.Linear(32, 8)).bfloat16()
    x = torch.randn(12, 24, dtype=torch.bfloat16)
    before = model[1].running_mean.clone()
    with torch.no_grad():
        report = report_of(model, x)
    assert agreed(report)
    torch.testing.assert_close(model[1].running_mean, before * 0.9 + model[0](x).mean(0) * 0.1, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("factor", [1.0005, 1.05])
@pytest.mark.parametrize("operator", ["gelu", "tanh_backward"])
def test_a_decomposition_that_is_wrong_by_less_than_a_rounding_is_found(operator: str, factor: float) -> None:
    with planted(Fault(operator, "pointwise", "decomposition", partial(scaled, by=factor))), without_compile_caches():
        report = report_of(program, *inputs())
    assert (cb.Kind.LOGIC, "grad[x]" if operator.endswith("backward") else "output[0]") in {
        (finding.kind, finding.subject) for finding in report.findings
    }


@pytest.mark.parametrize(
    ("operator", "where"), [("gelu", "decomposition"), ("tanh", "lowering"), ("tanh_backward", "decomposition")]
)
def test_what_is_wrong_in_its_own_precision_alone_is_named(operator: str, where: Table) -> None:
    with planted(Fault(operator, "pointwise", where, in_half_precision)), without_compile_caches():
        report = report_of(program, *inputs())
    named = "torch._C._nn.gelu" if operator == "gelu" else "torch.tanh"
    assert named in {finding.op for finding in report.findings}, str(report)


def test_what_does_not_run_in_float64_is_checked_with_a_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("not implemented for 'Double'")

    monkeypatch.setattr(LoweredRegion, "interpreted", refuse)
    with planted(Fault("gelu", "pointwise", "decomposition", in_half_precision)), without_compile_caches():
        report = report_of(program, *inputs())
    assert "torch._C._nn.gelu" in {finding.op for finding in report.findings}, str(report)


def test_no_cuda_graph_is_captured_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is it run where one might be, on whatever device."""
    asked: list[object] = []
    lowered = OperatorStep.lowered

    def noted(step: OperatorStep, call: Any) -> LoweredRegion | None:
        asked.append(lowered(step, call))
        return lowered(step, call)

    monkeypatch.setattr(OperatorStep, "lowered", noted)
    for cudagraphs in (True, False):
        compiled = checked(program, "inductor", compiler_options={"triton.cudagraphs": cudagraphs})
        assert agreed(gathered(lambda: compiled(*inputs()).sum().backward()))  # noqa: B023  called at once
        assert [one is None for one in asked] == [cudagraphs] * 2
        asked.clear()


def test_another_thread_goes_on_calling_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    args = tuple(value.detach() for value in inputs())
    results: list[torch.Tensor] = []
    interpreted = LoweredRegion.interpreted

    @contextmanager
    def meanwhile(lowered: LoweredRegion, mode: Any) -> Iterator[None]:
        def call() -> None:
            results.extend(lowered.region(*args))

        with interpreted(lowered, mode):
            thread = threading.Thread(target=call)
            thread.start()
            thread.join()
            yield

    monkeypatch.setattr(LoweredRegion, "interpreted", meanwhile)
    with torch.no_grad():
        assert agreed(report_of(program, *args))
        expected = torch.compile(program)(*args)
    assert results
    assert all(torch.equal(result, expected) for result in results)
