"""What noise elsewhere hides: small elements beside large ones, good data after ill-conditioned data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

import checked_backend as cb
from tests.support import faults
from tests.support.noise_tools import mlp, rounding_otherwise
from tests.support.region_tools import agreed, checked, found, gathered


def mixed_units(x: torch.Tensor, boxes: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Coordinates in pixels and confidences of a thousandth, in one tensor."""
    return torch.cat([(x @ boxes) * 1000, torch.sigmoid(x @ scores) * 1e-3], -1)


@pytest.mark.parametrize("rest", [1.0, 1 + 1.2e-7], ids=["the rest is equal", "the rest is off by a rounding"])
def test_small_elements_are_compared_beside_large_ones(rest: float) -> None:
    def without_scores(tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat([tensor[..., :4] * rest, tensor[..., 4:] * 0], -1)

    x, boxes, scores = torch.randn(16, 32), torch.randn(32, 4), torch.randn(32, 20)
    report = gathered(lambda: checked(mixed_units, faults.spoiled_output(without_scores))(x, boxes, scores))
    assert found(report) == {("logic", "output[0]")}
    assert agreed(gathered(lambda: checked(mixed_units, faults.spoiled_output(lambda t: t * rest))(x, boxes, scores)))


def naive_variance(x: torch.Tensor) -> torch.Tensor:
    return (x * x).mean(-1) - x.mean(-1) ** 2


@pytest.mark.parametrize("offset", [0.0, 1e3, 1e4])
def test_cancellation_hides_no_wrong_factor(offset: float) -> None:
    x = torch.randn(64, 256) + offset
    wrong = faults.spoiled_output(lambda variance: variance * 2)
    assert found(gathered(lambda: checked(naive_variance, wrong)(x))) == {("logic", "output[0]")}
    assert agreed(gathered(lambda: checked(naive_variance, lambda gm, _: lambda x: gm.forward(x.flip(-1)))(x)))


def test_noise_of_ill_conditioned_data_excuses_nothing_in_later_data() -> None:
    def run(compiler: Any) -> cb.Report:
        compiled = checked(naive_variance, compiler)
        data = [torch.randn(64, 256) + 1e4, *(torch.randn(64, 256) for _ in range(4))]
        return gathered(lambda: [compiled(x) for x in data])

    half = faults.spoiled_output(lambda variance: variance * 0.5)
    assert found(run(faults.on_data(lambda args: args[0].mean() < 1, half))) == {("logic", "output[0]")}
    assert agreed(run(faults.spoiled_output(rounding_otherwise)))


def large(args: Sequence[Any]) -> bool:
    return any(bool((arg.detach().abs() > 100).any()) for arg in args if isinstance(arg, torch.Tensor))


@pytest.mark.parametrize(("order", "seen"), [((0, 1), True), ((0, 0, 1), False), ((0, 0, 0, 1), True)])
def test_half_precision_is_asked_again_ever_more_rarely(order: tuple[int, ...], seen: bool) -> None:
    """What differs by less than its noise is seen in the first call, the second, the fourth, the eighth, ..."""
    data = (torch.randn(6, 8, dtype=torch.bfloat16), torch.randn(6, 8, dtype=torch.bfloat16) * 1000)
    off = faults.spoiled_output(lambda tensor: (tensor.double() * 1.003).to(tensor.dtype))

    def run() -> None:
        compiled = checked(mlp(torch.bfloat16), faults.on_data(large, off))
        with torch.no_grad():
            for place in order:
                compiled(data[place])

    report = gathered(run)
    assert found(report) == ({("logic", "output[0]")} if seen else set())
    if not seen:  # and no more is claimed
        assert report.coverage.detection_limit["output[0]"] > 0.003


def test_a_first_call_that_alone_is_wrong_is_found() -> None:
    once = faults.only_in_call(1, faults.spoiled_output(lambda result: result * 1.1))
    report = gathered(lambda: checked(torch.sin, once)(torch.randn(50)))
    assert {finding.subject for finding in report.findings} == {"output[0]"}
    assert report.findings[0].evidence["difference_repeats"] == "in 0 of 2 more runs of the candidate"
    assert not any("random" in skip.reason for skip in report.coverage.skipped)
