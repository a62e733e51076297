"""What a cancelling sum leaves is rounding: a compiler that sums in other steps may leave more of it, within bounds."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import checked_backend as cb
from tests.support import faults
from tests.support.region_tools import agreed, checked, found, gathered


def normalised(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """The bias has no influence, so its gradient is nothing but rounding: 3e-4 beside terms of 1."""
    return F.batch_norm(x + bias[:, None, None], None, None, training=True)


def trained(error: float, *, in_all_dtypes: bool = False) -> cb.Report:
    x, bias = torch.randn(8, 16, 16, 16), torch.randn(16, requires_grad=True)

    def spoiled(grad: torch.Tensor) -> torch.Tensor:
        return grad + error if in_all_dtypes or grad.dtype == torch.float32 else grad

    model = checked(normalised, faults.spoiled_gradient("bias", spoiled, "aot"))
    upstream = torch.linspace(-1, 1, x.numel()).view(x.shape)
    return gathered(lambda: (model(x, bias) * upstream).sum().backward())


def test_a_larger_residue_is_noise_and_widens_the_limit() -> None:
    report = agreed(trained(2e-3))
    assert report.coverage.own_precision_limit["grad[bias]"] > 32


@pytest.mark.inductor
@pytest.mark.parametrize("images", [2, 8])
def test_equal_terms_of_two_signs_are_added_up_in_any_order(images: int) -> None:
    """What arrives is the result itself: it is nearly zero for each channel, and so is the gradient of its bias."""
    pooled = (nn.BatchNorm2d(16), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    model = checked(nn.Sequential(nn.Conv2d(4, 16, 3, padding=1), *pooled), "inductor")
    report = gathered(lambda: model(torch.randn(images, 4, 48, 48)).square().sum().backward())
    assert agreed(report), report


@pytest.mark.parametrize("error", [0.05, 1.0, float("nan")])
def test_far_more_than_a_residue_is_found(error: float) -> None:
    ((kind, subject),) = found(trained(error))
    assert subject == "grad[bias]"
    assert kind == ("precision" if error == error else "nonfinite")


def test_what_float64_leaves_too_is_wrong_logic_however_small() -> None:
    assert found(trained(5e-3, in_all_dtypes=True)) == {("logic", "grad[bias]")}
