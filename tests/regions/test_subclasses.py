"""Tensor subclasses have noise and a float64 like others."""

from __future__ import annotations

import torch
from torch.testing._internal.two_tensor import TwoTensor

from tests.support import faults
from tests.support.noise_tools import rounding_otherwise
from tests.support.region_tools import agreed, checked, found, gathered


def test_wrapper_subclass_has_noise() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        for _ in range(8):
            x = torch.sin(x @ x) * 2
        return x

    x = TwoTensor(torch.randn(8, 8), torch.randn(8, 8))
    assert agreed(gathered(lambda: checked(program, faults.spoiled_output(rounding_otherwise))(x)))


def test_wrong_value_in_a_wrapper_subclass_is_logic() -> None:
    x = TwoTensor(torch.randn(4, 4), torch.randn(4, 4))
    compiler = faults.spoiled_output(lambda tensor: tensor * 1.01)
    report = gathered(lambda: checked(lambda x: torch.sin(x @ x), compiler)(x))
    assert found(report) == {("logic", "output[0]")}
    assert not report.coverage.skipped
    assert all(finding.noise is not None and finding.noise.rms > 0 for finding in report.findings)
