"""Eager differs from run to run: by rounding, which is noise, or by more, which is not."""

from __future__ import annotations

import itertools

import pytest
import torch

import checked_backend as cb
from checked_backend import Verdict
from tests.support import faults
from tests.support.region_tools import checked, gathered
from tests.support.scripted_controls import Scripted, decided, exact


@pytest.fixture
def unsteady():
    """Registers operators that know how often they ran; returns a program that uses one."""
    runs = itertools.count()

    def drifting(x: torch.Tensor, by: float) -> torch.Tensor:
        return x * (1.0 + by * (next(runs) % 7))

    def reordered(x: torch.Tensor) -> torch.Tensor:
        order = torch.randperm(x.shape[0], generator=torch.Generator().manual_seed(next(runs)))
        total = torch.zeros_like(x[0])
        for row in x[order]:
            total += row
        return total

    def ticking(x: torch.Tensor) -> torch.Tensor:
        return torch.full((4,), 10**13 + next(runs))

    with torch.library._scoped_library("unsteady", "FRAGMENT") as library:
        for schema, kernel, fake in (
            ("ticking(Tensor x) -> Tensor", ticking, lambda x: x.new_empty(4, dtype=torch.int64)),
            ("drifting(Tensor x, float by) -> Tensor", drifting, lambda x, by: torch.empty_like(x)),
            ("reordered(Tensor x) -> Tensor", reordered, lambda x: torch.empty_like(x[0])),
        ):
            library.define(schema)
            library.impl(kernel.__name__, kernel, "CPU")
            torch.library.register_fake(f"unsteady::{kernel.__name__}", fake, lib=library)
        yield lambda name, *arguments: lambda x: getattr(torch.ops.unsteady, name)(x, *arguments) + 1


def numcheck(program, x, compiler="nop"):
    compiled = checked(program, compiler)
    return gathered(lambda: [compiled(x) for _ in range(3)])


def check(program, x, compiler="nop"):
    return cb.check(program, (x,), compiler=compiler, dynamic=False)


@pytest.mark.parametrize("face", [check, numcheck])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("by", [0.1, 1e-4])
def test_what_is_no_rounding_is_no_noise(face, dtype, by, unsteady):
    report = face(unsteady("drifting", by), torch.randn(200, dtype=dtype))
    assert report.verdict is Verdict.INCONCLUSIVE
    assert {str(finding.kind) for finding in report.findings} == {"nondeterministic"}
    assert "does not repeat itself" in report.findings[0].message
    assert report.findings[0].evidence["eager_spread"] > by / 10


@pytest.mark.parametrize("face", [check, numcheck])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_without_a_fixed_order_are_noise(face, dtype, unsteady):
    report = face(unsteady("reordered"), torch.randn(300, 40).to(dtype))
    assert report.verdict is Verdict.PASS, report


@pytest.mark.parametrize("face", [check, numcheck])
def test_integers_that_tick_are_no_noise(face, unsteady):
    report = face(unsteady("ticking"), torch.randn(3))
    assert report.verdict is Verdict.INCONCLUSIVE
    assert {str(finding.kind) for finding in report.findings} == {"nondeterministic"}


@pytest.mark.parametrize("face", [check, numcheck])
def test_places_of_the_greatest_sums_without_a_fixed_order_are_noise(face, unsteady):
    x = torch.randn(300, 40)
    x[:, 7] = x[torch.randperm(300), 3]
    x[:, [3, 7]] += 1
    x[0, 7] += 2e-5  # the greater of two sums, by less than the rounding of either
    assert face(lambda x: unsteady("reordered")(x).argmax(), x).verdict is Verdict.PASS


def test_digits_that_cancel_in_float64_too_are_noise():
    def residue(x):  # what rounding leaves, in float64 too; it is nowhere zero on any processor
        return 1 / (x / 3.1 * 3.1 - x).square().sum()

    report = cb.check(residue, (torch.linspace(0.1, 1.7, 12),), compiler=faults.every_output(lambda result: result * 3))
    assert report.verdict is Verdict.PASS
    assert report.coverage.detection_limit["output[0]"] > 1


def test_gelu_that_loses_large_numbers_in_eager_alone():
    assert check(torch.nn.functional.gelu, torch.tensor([float("inf"), 3.4e38, 1.0, -1.0] * 8)).verdict is Verdict.PASS


@pytest.mark.parametrize(("face", "everywhere"), [(check, True), (numcheck, True), (numcheck, False)])
def test_sums_without_a_fixed_order_hide_nothing_much_larger(face, everywhere, unsteady):
    """Eager differs from itself in the last place: that excuses no factor."""
    compiler = faults.spoiled_output(lambda t: t * 1.01 if everywhere or t.dtype is not torch.float64 else t)
    report = face(unsteady("reordered"), torch.randn(300, 40), compiler)
    assert {finding.detail for finding in report.findings} == {"logic" if everywhere else "logic.this_dtype"}


@pytest.mark.parametrize("lost", [(), ("bare",)])
def test_a_write_before_the_runs_is_no_noise(lost):
    """Eager gave twice as much before it."""
    controls = Scripted(torch.float32, exact(), exact, alone=lambda: exact().float(), lost=lost, written=("scale",))
    decisions = decided(controls, exact() * 2.2, reference=(exact() * 2).to(torch.float32))
    assert not decisions.findings
    (skip,) = [skip for skip in decisions.skips if skip.matters]
    assert (skip.subject, "wrote to scale" in skip.reason) == ("output[0]", True)


def test_what_torch_computes_otherwise_under_a_mode_is_no_noise():
    """Its formula under a mode ignores the product that it is given (pytorch/pytorch#172062)."""
    torch.manual_seed(0)
    grad, x, product = (torch.randn(1, 100, dtype=torch.float64) * 0.1 for _ in range(3))
    backward = torch.ops.aten.cumprod_backward
    for given, verdict in ((product, Verdict.FAIL), (x.cumprod(1), Verdict.PASS)):
        report = cb.check(lambda x, given: backward(grad, x, 1, given), (x, given), compiler="aot_eager")
        assert report.verdict is verdict
        assert all("under a dispatch mode" in finding.message for finding in report.findings)


def test_what_torch_rounds_otherwise_under_a_mode_is_noise():
    """The gradient of a product, among the subnormal numbers."""
    x = torch.full((1, 6), 0.11).half().requires_grad_()
    assert cb.check(lambda x: x.prod(1), (x,), compiler="aot_eager").verdict is Verdict.PASS
