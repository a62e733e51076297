"""Wrong by many times the noise is not called precision, also where the float64 twin is right."""

from __future__ import annotations

import socket
from datetime import datetime, timedelta, timezone

import pytest
import torch
from torch import nn

from tests.support import faults
from tests.support.region_tools import checked, gathered


def trained(model, compiler, calls=3):
    torch._dynamo.reset()
    compiled = checked(model, compiler)

    def train():
        for _ in range(calls):
            compiled(torch.randn(4, 8)).square().sum().backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.01 * parameter.grad
            model.zero_grad()

    return gathered(train)


def details(report):
    return {finding.detail for finding in report.findings}


@pytest.mark.parametrize("factor", [2.0, 0.0])
def test_a_gradient_wrong_at_its_own_precision_only(factor):
    wrong = faults.spoiled_gradient("0.weight", lambda grad: grad * (factor if grad.dtype is torch.float32 else 1))
    report = trained(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)), wrong)
    assert details(report) == {"logic.this_dtype"}
    assert "wrong in float32 only" in report.findings[0].message


@pytest.mark.parametrize("factor", [1.5, float("nan"), 0])
def test_an_error_in_one_call(factor):
    report = trained(nn.Linear(8, 2), faults.only_in_call(3, faults.spoiled_output(lambda out: out * factor)))
    assert details(report) == {"logic.this_call"}
    finding = report.findings[0]
    assert "not reproduced: possibly hardware" in finding.message
    assert finding.evidence["host"] == socket.gethostname()
    assert finding.evidence["device"].startswith("cpu: ")
    assert abs(datetime.now(timezone.utc) - datetime.fromisoformat(finding.evidence["time"])) < timedelta(hours=1)


def test_a_changed_input_wrong_in_one_call_only():
    def tripled(gm, _example_inputs):
        return lambda *args: (gm.forward(*args), args[-1].mul_(3))[0]

    compiled = checked(lambda x: x.add_(1).sum(), faults.only_in_call(3, tripled))
    assert details(gathered(lambda: [compiled(torch.arange(6.0)) for _ in range(4)])) == {"logic.this_call"}


def test_an_error_that_repeats_names_no_machine():
    report = trained(nn.Linear(8, 2), faults.spoiled_output(lambda out: out * 1.5))
    assert report.findings
    assert all("host" not in finding.evidence for finding in report.findings)
    assert "hardware" not in str(report)


@pytest.mark.parametrize(
    ("arriving", "is_wrong_for"),
    [
        (torch.ones(()).expand(4, 2), lambda grad: 0 in grad.stride()),
        (torch.randn(4, 5)[:, 1::2], lambda grad: grad.storage_offset() > 0 and grad.stride() == (5, 2)),
        (torch.randn(2, 4).t(), lambda grad: grad.stride() == (1, 4)),
    ],
    ids=["expanded", "with gaps", "transposed"],
)
def test_an_error_for_gradients_of_one_layout_is_no_error_of_one_call(arriving, is_wrong_for):
    """It shows again, because control runs are given gradients in the same layout."""
    compiled = checked(nn.Linear(8, 2), faults.spoiled_tangents(lambda grad: grad * 2 if is_wrong_for(grad) else grad))
    assert details(gathered(lambda: compiled(torch.randn(4, 8)).backward(arriving))) == {"logic"}


def test_weights_of_the_first_call():
    report = trained(nn.Linear(8, 2), faults.stale_parameters)
    assert report.findings
    assert "precision" not in {str(finding.kind) for finding in report.findings}


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 2)
        self.register_buffer("n", torch.zeros(()))

    def forward(self, x):
        self.n += 1
        return self.linear(x) * self.n


def test_a_buffer_counted_up_and_used_in_one_call():
    """AOT autograd saves the buffer for backward by reference: gradients are those of a later count."""
    assert "precision" not in details(trained(Counting(), "aot_eager"))
