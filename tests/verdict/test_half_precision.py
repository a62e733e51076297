"""Bugs that half precision hides are found in float64; those of half precision alone exceed its noise."""

from __future__ import annotations

import pytest
import torch

import checked_backend as cb
from tests.support import faults
from tests.support.noise_tools import mlp, train
from tests.support.region_tools import agreed, checked, found, gathered


def slightly_off(tensor: torch.Tensor) -> torch.Tensor:
    return tensor * (1 + 1e-5) if tensor.dtype is torch.float64 else tensor * 1.0


@pytest.mark.parametrize(("face", "how"), [("check", "python"), ("numcheck", "aot")])
def test_error_below_half_precision_is_found(how: faults.How, face: str) -> None:
    compiler = faults.spoiled_output(slightly_off, 0, how)
    model, x = mlp(torch.bfloat16), torch.randn(6, 8, dtype=torch.bfloat16)
    if face == "check":
        report = cb.check(model, (x,), compiler=compiler, gradients=False)
    else:
        report = gathered(lambda: checked(model, compiler)(x))
    assert found(report) == {("logic", "output[0]")}
    [finding] = report.findings
    assert finding.metrics.bitwise_equal
    assert finding.evidence["float64_twin_error"] == pytest.approx(1e-5, rel=10)
    assert "hides that bit for bit" in " ".join(report.to_text(verbose=True).split())


@pytest.mark.parametrize("how", ["python", "aot"])
def test_gradient_below_half_precision_is_found(how: faults.How) -> None:
    compiler = faults.spoiled_gradient("0.weight", slightly_off, how)
    report = gathered(lambda: train(checked(mlp(torch.bfloat16), compiler), torch.bfloat16))
    assert found(report) == {("logic", "grad[0.weight]")}


def test_fault_of_the_twin_alone_is_not_the_candidates() -> None:
    """A compiler that is wrong in float64 only: said in a note, not held against the program in bfloat16."""
    compiler = faults.spoiled_output(lambda tensor: tensor * 1.5 if tensor.dtype is torch.float64 else tensor)
    report = gathered(lambda: checked(mlp(torch.bfloat16), compiler)(torch.randn(6, 8, dtype=torch.bfloat16)))
    assert report.verdict is cb.Verdict.PASS
    assert [("the float64 twin was not used" in note) for note in report.coverage.notes] == [True]


def test_power_against_wrong_kernels_of_one_precision_is_told() -> None:
    """The float64 twin shows that the logic is right; what is wrong in bfloat16 alone must exceed bfloat16's noise."""
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 32)).to(torch.bfloat16)
    x = torch.randn(16, 32, dtype=torch.bfloat16)

    def wrong_by(factor: float) -> cb.Report:
        def spoil(tensor: torch.Tensor) -> torch.Tensor:
            return tensor * factor if tensor.dtype is torch.bfloat16 else tensor

        with torch.no_grad():
            return gathered(lambda: checked(model, faults.spoiled_output(spoil))(x))

    report = agreed(wrong_by(1.004))
    assert report.coverage.detection_limit["output[0]"] < 1e-8
    told = report.coverage.own_precision_limit["output[0]"]
    assert 0.004 < told < 0.5
    assert agreed(wrong_by(1 + told / 4))
    assert found(wrong_by(1 + 6 * told))
    assert found(wrong_by(1 - 6 * told))
