"""Elements that have lost their digits, beside larger ones that hide them in every norm."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

import checked_backend as cb
from checked_backend.verdict import elements
from checked_backend.verdict.envelope import Envelope
from checked_backend.verdict.outliers import lost_digits, outside_noise
from tests.support import faults


def values(dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers around 1 and around 1e-10."""
    large = torch.linspace(0.5, 2, 60, dtype=torch.float64)
    return torch.cat([large, large[:20] * 1e-10]).to(dtype)


def places_of(reference: Tensor, candidate: Tensor, exact: Tensor) -> list[int]:
    """Where the candidate has lost digits that eager has."""
    lost = lost_digits(reference=reference, candidate=candidate, high_precision=exact)
    with mock.patch.object(elements, "_BLOCK", 7):
        assert torch.equal(lost, lost_digits(reference=reference, candidate=candidate, high_precision=exact))
    return lost.nonzero().flatten().tolist()


def test_small_elements_without_a_right_digit_are_found() -> None:
    right = values()
    assert places_of(right, torch.where(right < 1e-6, right * 1.5, right), right.double()) == [*range(60, 80)]


def test_eager_that_has_lost_them_too_asks_for_none() -> None:
    right = values()
    eager = torch.where(right < 1e-6, right * 1.1, right)
    assert places_of(eager, torch.where(right < 1e-6, right * 1.5, right), right.double()) == []


def test_one_element_that_is_small_because_large_numbers_cancel_is_none() -> None:
    """Eager is near by chance in it: its error is a tenth of the typical one, and the candidate's is typical."""
    exact = torch.cat([torch.linspace(1e9, 6e9, 251, dtype=torch.float64), torch.tensor([2e4], dtype=torch.float64)])
    typical = torch.where(torch.arange(252) % 2 == 0, 2e7, -2e7)
    eager, candidate = exact + typical, exact - typical
    eager[-1], candidate[-1] = 2e4 + 1e6, 2e4 + 3e7
    assert places_of(eager.float(), candidate.float(), exact) == []
    candidate[-1] = 2e4 + 2e9  # no error is like that elsewhere
    assert places_of(eager.float(), candidate.float(), exact) == [251]


def test_some_elements_that_eager_has_right_are_not_right_by_chance() -> None:
    exact = torch.cat([torch.linspace(1, 2, 100, dtype=torch.float64), torch.full((6,), 1e-2, dtype=torch.float64)])
    eager = exact * 1.004
    candidate = torch.where(exact < 0.1, exact * 1.4, exact * 1.004)
    assert places_of(eager.float(), candidate.float(), exact) == [*range(100, 106)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rounding_of_half_precision_loses_none(dtype: torch.dtype) -> None:
    exact = values(torch.float64).clamp_min(1e-3)
    rounded = exact.to(dtype)
    assert places_of(rounded, torch.nextafter(rounded, rounded * 2), exact) == []


def test_zero_nan_infinity_and_denormal_numbers_have_no_digits_to_lose() -> None:
    exact = torch.tensor([0.0, float("nan"), float("inf"), 1e-40, 1.0], dtype=torch.float64)
    assert places_of(exact.float(), torch.tensor([1e-3, 1.0, 1.0, 0.0, 1.0]), exact) == []


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
def test_other_dtypes_are_not_compared(dtype: torch.dtype) -> None:
    one = torch.ones(3, dtype=dtype)
    assert lost_digits(reference=one, candidate=one, high_precision=one) is None


@pytest.mark.parametrize(("noise", "found"), [(1e-9, 20), (1e-5, 0)])
def test_only_an_element_beyond_its_own_noise_is_outside(noise: float, found: int) -> None:
    large = torch.linspace(0.5, 2, 60)
    right = torch.cat([large, large[:20] * 2**-9])
    wrong = torch.where(right < 0.1, right * 1.01, right)
    envelope = Envelope(torch.where(right < 0.1, noise, 1e-5))
    outside = outside_noise(reference=right, candidate=wrong, envelope=envelope, high_precision=right.double())
    assert (outside.count, outside.digits) == (found, found)
    assert outside_noise(reference=right, candidate=wrong, envelope=envelope).doubtful == found


def test_large_elements_lend_no_noise_to_those_far_below() -> None:
    right = values()
    wrong = torch.where(right < 1e-6, right * 1.0005, right)
    envelope = Envelope(right * 6e-8)
    for high_precision in (None, right.double()):
        outside = outside_noise(reference=right, candidate=wrong, envelope=envelope, high_precision=high_precision)
        assert (outside.count, outside.digits) == (20, 0)


WRONG = {  # the first two are right in exact arithmetic
    "expm1": (torch.expm1, lambda x: torch.exp(x) - 1, "precision"),
    "log1p": (torch.log1p, lambda x: torch.log(1 + x), "precision"),
    "tanh": (torch.tanh, lambda x: torch.where(x < 1e-7, 0.0, torch.tanh(x)), "logic"),
    "sign": (operator.neg, lambda x: torch.where(x < 1e-6, x, -x), "logic"),
}


@pytest.mark.parametrize("name", WRONG)
def test_check_finds_them(name: str) -> None:
    target, wrong, kind = WRONG[name]
    report = cb.check(lambda x: target(x) * 1.5, (values(),), compiler=faults.instead(lambda x: wrong(x) * 1.5))
    assert report.verdict is cb.Verdict.FAIL
    assert {str(finding.detail) for finding in report.findings} == {kind}
    assert cb.check(lambda x: target(x) * 1.5, (values(),), compiler=faults.clean()).verdict is cb.Verdict.PASS


CANCELLING = {
    "deviation from the mean": lambda x: x - x.mean(),
    "difference of squares": lambda x: x * x - x.flip(0) * x,
    "tail of gelu": lambda x: F.gelu(x * 4),
    "difference from a softmax": lambda x: F.softmax(x, 0) - 2e-4,
}


def in_float64(gm: fx.GraphModule, _example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """A compiler that rounds nothing but the results."""
    return lambda *args: [result.to(args[0].dtype) for result in gm.forward(*(arg.double() for arg in args))]


@pytest.mark.parametrize("name", CANCELLING)
def test_digits_that_eager_lost_may_be_there(name: str) -> None:
    x = torch.randn(5000, generator=torch.Generator().manual_seed(0))
    assert cb.check(CANCELLING[name], (x,), compiler=in_float64).verdict is cb.Verdict.PASS
