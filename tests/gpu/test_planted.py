"""Planted faults of kernels: each fails, and the operator is named where one is at fault."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import checked_backend as cb
from checked_backend._torch.caches import without_compile_caches
from tests.calibration.compilers import candidate
from tests.gpu.test_models import train
from tests.support import faults, models, more_models
from tests.support.models import Case
from tests.support.planted import Fault, planted, scaled
from tests.support.region_tools import agreed, backwards, checked, found, gathered


def model(x: torch.Tensor) -> torch.Tensor:
    return (torch.sigmoid(x * 0.5) + 1).sum(-1)


@pytest.fixture
def data(device: str) -> torch.Tensor:
    return torch.randn(33, 65, device=device)


def wrong_lowering(operator: str, by: float) -> Fault:
    return Fault(operator, "pointwise", "lowering", partial(scaled, by=by))


@pytest.fixture
def _wrong_lowering() -> Iterator[None]:
    with planted(wrong_lowering("sigmoid", 1.01)), without_compile_caches():
        yield


@pytest.mark.usefixtures("_wrong_lowering")
def test_a_wrong_lowering_is_found_and_named(data: torch.Tensor) -> None:
    report = cb.check(model, (data,), localize=True)
    assert report.verdict is cb.Verdict.FAIL
    assert {finding.op for finding in report.findings} == {"aten.sigmoid.default"}, str(report)


def test_the_right_lowering_is_not_accused(data: torch.Tensor) -> None:
    assert cb.check(model, (data,)).verdict is cb.Verdict.PASS


@pytest.mark.parametrize(
    ("make", "operator", "precision"),
    [
        (models.bert_classifier, "erf", "float32"),
        (more_models.HALF["gpt2"], "tanh", "autocast"),
        (more_models.WRITTEN_HERE["unet"], "rsqrt", "float32"),
        (models.resnet, "rsqrt", "autocast"),
    ],
)
def test_a_wrong_kernel_of_a_model_is_named(
    make: Callable[[], Case], operator: str, precision: str, device: str
) -> None:
    with planted(wrong_lowering(operator, 1.03)), without_compile_caches():
        report = gathered(
            lambda: train(make, device, precision, lambda model: checked(model, "inductor", localize=True))
        )
    assert report.verdict is cb.Verdict.FAIL, str(report)
    assert f"aten.{operator}.default" in {finding.op for finding in report.findings}, str(report)


def test_a_wrong_constant_is_found(data: torch.Tensor) -> None:
    def compiler(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        for node in gm.graph.nodes:
            node.args = tuple(0.51 if argument == 0.5 else argument for argument in node.args)
        gm.recompile()
        return candidate("inductor")(gm, example_inputs)

    report = cb.check(model, (data,), compiler=compiler)
    assert [finding.kind for finding in report.findings] == [cb.Kind.LOGIC], str(report)


def test_a_wrong_gradient_is_found(device: str) -> None:
    """The gradients of a GPU are computed in a thread of the autograd engine."""

    def report(compiler: Any) -> cb.Report:
        layer = checked(torch.nn.Linear(8, 4).to(device), compiler)
        return gathered(lambda: layer(torch.randn(3, 8, device=device)).sum().backward())

    right = report("inductor")
    assert agreed(right)
    assert backwards(right) == 1
    assert found(report(faults.scaled_gradient("weight"))) == {("logic", "grad[weight]")}


def test_a_buffer_that_is_read_before_it_is_written_is_found(data: torch.Tensor) -> None:
    def accumulates(x: torch.Tensor) -> torch.Tensor:
        return torch.zeros(x.shape, device=x.device).add_(x.sin())

    def compiler(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        for node in gm.graph.nodes:
            if node.target is torch.zeros:
                node.target = torch.empty
        gm.recompile()
        return gm.forward

    report = cb.check(accumulates, (data,), compiler=compiler)
    assert report.verdict is cb.Verdict.FAIL, str(report)
    assert cb.check(accumulates, (data,)).verdict is cb.Verdict.PASS


@pytest.mark.parametrize(("masked", "verdict"), [(True, cb.Verdict.PASS), (False, cb.Verdict.FAIL)])
def test_a_missed_mask_of_a_triton_kernel_is_found(gpu: str, masked: bool, verdict: cb.Verdict) -> None:
    kernels = pytest.importorskip("tests.gpu.triton_kernels", reason="needs Triton")

    def compiler(_gm: torch.fx.GraphModule, _example_inputs: Sequence[Any]) -> Callable[..., Any]:
        return lambda *args: (kernels.row_sum(args[0], masked=masked),)

    x = torch.randn(64, 128, device=gpu)[:, :65]  # what lies behind a row is not zero
    report = cb.check(lambda x: x.sum(-1), (x,), compiler=compiler)
    assert report.verdict is verdict, str(report)


BACKEND = '''
import torch


def wrong(gm, example_inputs):
    """Inductor, and 1 % too much."""
    compiled = torch._dynamo.lookup_backend("inductor")(gm, example_inputs)
    return lambda *args: [result * 1.01 for result in compiled(*args)]
'''


def test_a_repro_fails_in_a_fresh_process(data: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wrong_on_gpu.py").write_text(BACKEND)
    monkeypatch.syspath_prepend(str(tmp_path))
    report = cb.check(model, (data,), compiler=__import__("wrong_on_gpu").wrong, localize=True)
    (finding,) = report.findings
    assert finding.repro is not None, str(report)
    assert data.device.type in Path(finding.repro).read_text() or data.device.type == "cpu"
