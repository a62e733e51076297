"""Kernels: a user's own in Triton, random ones of Inductor, and those that autotuning does not take."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import checked_backend as cb
from tests.support import faults


def test_a_kernel_of_the_users_own_is_checked(gpu: str) -> None:
    kernels = pytest.importorskip("tests.gpu.triton_kernels", reason="needs Triton")
    x = torch.randn(1000, device=gpu)
    assert cb.check(lambda x: kernels.doubled(x).sin(), (x,)).verdict is cb.Verdict.PASS
    wrong = faults.every_output(lambda result: result + 0.01)
    assert cb.check(lambda x: kernels.doubled(x).sin(), (x,), compiler=wrong).verdict is cb.Verdict.FAIL


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_dropout_by_inductors_own_generator_is_not_accused(device: str, rate: float) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Dropout(rate), torch.nn.Linear(64, 8)).to(device)
    assert cb.check(model, (torch.randn(16, 32, device=device),)).verdict is cb.Verdict.PASS


def test_other_kernels_than_the_fastest_are_right(device: str) -> None:
    options = {"max_autotune": True, "max_autotune_gemm_backends": "ATEN,CPP" if device == "cpu" else "ATEN,TRITON"}
    x, y = torch.randn(4, 64, 128, device=device), torch.randn(4, 128, 96, device=device)
    report = cb.check(lambda x, y: torch.bmm(x, y).relu(), (x, y), compiler_options=options, choices=3)
    assert report.verdict is cb.Verdict.PASS, str(report)
    assert report.coverage.checked["kernel choices"] == 3


def test_configurations_of_triton_kernels_are_told(gpu: str) -> None:
    options = {"max_autotune_pointwise": True, "coordinate_descent_tuning": True}
    x = torch.randn(256, 1000, device=gpu)
    report = cb.check(lambda x: x.softmax(-1), (x,), compiler_options=options, choices=2)
    assert report.verdict is cb.Verdict.PASS, str(report)
    assert any("BLOCK" in note for note in report.coverage.notes), str(report)


def test_a_program_is_compared_with_itself(device: str) -> None:
    """Whether the bits stay is the machine's matter. Each question has an answer, and a difference has its operator."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.GELU(), torch.nn.Linear(96, 32)).to(device).eval()
    with torch.no_grad():
        report = cb.check(model, (torch.randn(9, 64, device=device),), invariant=("batch", "runs", "choices"))
    assert report.coverage.notes[0].startswith("accurate: yes; batch-invariant: "), str(report)
    assert "not known" not in report.coverage.notes[0]
    assert all(finding.op for finding in report.findings), str(report)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.int32])
def test_measuring_on_the_device_is_measuring(device: str, dtype: torch.dtype) -> None:
    one = (50 * torch.randn(1000)).to(dtype)
    other = one.clone()
    other[7] += 1
    here = cb.measure(reference=one, candidate=other)
    there = cb.measure(reference=one.to(device), candidate=other.to(device))
    # a GPU adds the squares up in another order
    sums = {name: pytest.approx(getattr(here, name), rel=1e-12) for name in ("reference_rms", "rmse")}
    assert there == replace(here, **sums)
