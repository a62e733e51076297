"""Tensor subclasses have noise and a float64 like others."""

from __future__ import annotations

from typing import Any

import pytest
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


@pytest.fixture
def uncopied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrappers cannot be cloned, as torchao's optimizer states."""
    dispatch = TwoTensor.__torch_dispatch__

    def without_clone(_cls: type, func: Any, *more: Any) -> Any:
        if func is torch.ops.aten.clone.default:
            raise NotImplementedError("clone")
        return dispatch(func, *more)

    monkeypatch.setattr(TwoTensor, "__torch_dispatch__", classmethod(without_clone))


@pytest.mark.usefixtures("uncopied")
@pytest.mark.parametrize(
    ("compiler", "expected"), [("aot_eager", set()), (faults.spoiled_output(torch.neg), {("logic", "output[0]")})]
)
def test_a_wrapper_that_cannot_be_cloned_is_copied_part_by_part(compiler: Any, expected: set[Any]) -> None:
    def step(state: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        state.mul_(0.9).add_(gradient)
        return gradient * 2

    state, gradient = TwoTensor(torch.ones(4), torch.ones(4)), torch.randn(4)
    report = gathered(lambda: checked(step, compiler)(state, gradient))
    assert found(report) == expected, str(report)
    assert report.coverage.checked["mutated inputs"] >= 1
    assert torch.equal(state.a, 0.9 + gradient)
