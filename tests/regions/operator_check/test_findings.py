"""Operators of a 16-bit region that are wrong by less than the whole program's noise are found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import checked_backend as cb
from checked_backend.regions.operator_check.findings import error_message
from checked_backend.verdict.local_error import LocalError
from tests.support import faults
from tests.support.low_precision import LOW, Change, at_16_bits, times, trained
from tests.support.region_tools import agreed, checked, found, gathered

FAULTS = {
    "gelu": lambda: faults.wrong_operator("aten.gelu.default", times(1.03), "aot"),
    "softmax": lambda: faults.wrong_operator("aten._softmax.default", times(0.97), "aot"),
    "a parameter's gradient": lambda: faults.spoiled_gradient("up.weight", times(1.03), "aot"),
    "the norm": lambda: faults.wrong_operator("aten.native_layer_norm.default", _first(times(1.03)), "aot"),
}


def _first(change: Change) -> Callable[[Any], Any]:
    return lambda results: (change(results[0]), *results[1:])


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("name", "dtype"), [*zip(FAULTS, (*LOW, *LOW[::-1]), strict=True)])
def test_operator_that_is_three_percent_off_at_16_bits_alone_is_found(name: str, dtype: torch.dtype) -> None:
    report = trained(FAULTS[name](), dtype)
    assert report.verdict is cb.Verdict.FAIL
    assert {finding.detail for finding in report.findings} <= {"logic.this_dtype", "precision.operator", "precision"}


def test_finding_names_operator_line_and_what_it_reaches() -> None:
    finding = trained(FAULTS["gelu"](), torch.float16).findings[0]
    assert (finding.kind, finding.detail, finding.subject) == (cb.Kind.LOGIC, "logic.this_dtype", "output[0]")
    assert (finding.op, finding.graph) == ("torch._C._nn.gelu", "dynamo")
    assert finding.node is not None
    assert "x = x + self.down(F.gelu(self.up(x)))" in str(finding.source)
    assert "is off by 0.03 in float16" in finding.message
    assert finding.evidence["operator_bias"] == pytest.approx(1.03, abs=1e-3)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (LocalError(0.9, 2.0, 0.014, 0.01, 0.014, 0.031), "a factor of 1.014 in common"),
        (LocalError(0.9, 2.0, -0.5, 0.01, 0.5, 0.031), "is too small in bfloat16"),
        (LocalError(4.0, 2.5, 0.0, 0.01, 0.027, 0.037), "4 times what a rounding or two"),
        (LocalError(4.0, 2.5, 0.0, 0.01, 0.3, 0.037), "is off by 0.3 in bfloat16: a rounding or two"),
        (LocalError(0.9, 2.5, 0.0, 0.01, 0.01, 0.037, outliers=1, worst=0.5), "in one element of 64"),
    ],
)
def test_message_gives_the_number_that_shows_the_error(error: LocalError, words: str) -> None:
    assert words in error_message("what gelu computes", "bfloat16", error, 64)


def test_gradient_of_a_percent_too_much_is_found_in_bfloat16() -> None:
    """A percent is 1.3 units in the last place there: of every element, and always the same."""
    report = trained(faults.spoiled_gradient("qkv.weight", times(1.01)), torch.bfloat16)
    assert found(report) == {("precision.operator", "grad[qkv.weight]")}


def test_four_units_in_the_last_place_of_float16_are_found() -> None:
    report = trained(faults.spoiled_gradient("down.weight", times(1.004)), torch.float16)
    assert found(report) == {("precision.operator", "grad[down.weight]")}


def test_wrong_signs_at_random_are_found_as_well_as_a_factor() -> None:
    def rough(tensor: torch.Tensor) -> torch.Tensor:
        signs = torch.rand(tensor.shape, generator=torch.Generator().manual_seed(1)).sub(0.5).sign()
        return tensor * (1 + 0.04 * signs.to(tensor.dtype))

    report = trained(faults.wrong_operator("aten.gelu.default", at_16_bits(rough), "aot"), torch.bfloat16)
    assert {finding.op for finding in report.findings} == {"torch._C._nn.gelu"}


def test_linear_that_is_wrong_under_autocast_is_found() -> None:
    report = trained(faults.wrong_operator("aten.addmm.default", times(1.1), "aot"), torch.bfloat16, amp=True)
    assert report.verdict is cb.Verdict.FAIL


def accumulated(gm: torch.fx.GraphModule, _inputs: Sequence[Any]) -> Callable[..., Any]:
    """A compiler whose sums of half precision are accumulated in half precision."""

    def summed(tensor: torch.Tensor) -> torch.Tensor:
        total = torch.zeros((), dtype=tensor.dtype)
        for value in tensor.flatten():
            total = total + value
        return total

    for node in gm.graph.find_nodes(op="call_method", target="mean"):
        node.op, node.target = "call_function", lambda value: summed(value) / value.numel()
    gm.recompile()
    return gm.forward


def test_loss_that_is_accumulated_at_16_bits_is_found() -> None:
    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x.sigmoid() - y).square().mean()

    x, y = torch.randn(600, dtype=torch.bfloat16), torch.rand(600, dtype=torch.bfloat16)
    assert agreed(gathered(lambda: checked(loss, faults.clean())(x, y)))
    assert gathered(lambda: checked(loss, accumulated)(x, y)).verdict is cb.Verdict.FAIL


def one_of(fault: Change, count: int = 1) -> Change:
    """A fault of a few elements, the middle ones."""

    def change(tensor: torch.Tensor) -> torch.Tensor:
        flat = tensor.flatten()
        place = torch.arange(flat.numel())
        some = (place >= flat.numel() // 2) & (place < flat.numel() // 2 + count)
        return torch.where(some, fault(flat), flat).reshape(tensor.shape)

    return at_16_bits(change)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("operator", "dtype"), [("gelu", LOW[0]), ("gelu_backward", LOW[1]), ("bmm", LOW[0]), ("_softmax", LOW[1])]
)
def test_one_element_that_is_wrong_at_16_bits_alone_is_found(operator: str, dtype: torch.dtype) -> None:
    factor = 1.25 if "backward" in operator else 1.1
    report = trained(faults.wrong_operator(f"aten.{operator}.default", one_of(times(factor)), "aot"), dtype)
    assert {finding.detail for finding in report.findings} == {"logic.this_dtype"}
    finding = report.findings[0]
    assert "is off in one element of" in finding.message
    assert finding.evidence["wrong_elements"] == 1
