"""Control runs of a program that NumPy computes a part of, in eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import checked_backend as cb
from tests.support.check_tools import agreed, only

VALUES = torch.tensor([-8.0, -1.0, 0.5, 8.0])


@pytest.mark.parametrize(
    "program",
    [
        lambda x: np.cbrt(x.numpy()),
        lambda x: torch.from_numpy(np.cbrt(x.numpy())) * 2,
        lambda x: {"root": np.cbrt(x.numpy() - 1), "same": x + 1},
    ],
)
def test_what_is_nan_in_dynamos_graph_alone_is_found(program: Callable[..., Any]) -> None:
    """NumPy has roots of negative numbers; what Dynamo puts in their place has none."""
    finding = only(cb.check(program, (VALUES,), compiler="eager"))
    assert (finding.kind, finding.stage) == (cb.Kind.NONFINITE, "eager")
    agreed(cb.check(program, (VALUES.abs() + 1.5,), compiler="eager"))


@pytest.mark.parametrize(
    "program",
    [
        lambda x: np.sqrt(x.numpy()),
        lambda x: np.power(x.numpy(), 1 / 3),
        lambda x: np.log1p(x.numpy()),
        lambda x: np.sign(x.numpy()) + np.round(x.numpy()),
        lambda x: np.arctan2(x.numpy(), x.numpy()[::-1].copy()),
        lambda x: x.numpy() * np.float64(1.1),
    ],
)
@pytest.mark.filterwarnings("ignore:invalid value encountered", "ignore:divide by zero")
def test_what_is_nan_in_eager_too_and_other_roundings_are_not_reported(program: Callable[..., Any]) -> None:
    agreed(cb.check(program, (VALUES,), compiler="eager"))


def test_rounding_of_numpys_functions_is_in_the_limit() -> None:
    """No mode sees what NumPy computes. Digits that cancel there hide errors of any size."""

    def program(x: torch.Tensor) -> Any:
        values = x.numpy()
        return np.sum(values) - np.sum(np.sort(values))

    report = agreed(cb.check(program, (torch.rand(4000) * 1e3,), compiler="eager"))
    assert min(report.coverage.detection_limit.values()) > 1e-2
