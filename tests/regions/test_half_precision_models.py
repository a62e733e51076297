"""Clean models in bfloat16 and under autocast, by Inductor: none fails, none is inconclusive without a reason."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import checked_backend as cb
from tests.support.half_models import MODELS
from tests.support.models import Case
from tests.support.region_tools import checked, gathered

pytestmark = [
    pytest.mark.inductor,
    pytest.mark.slow,
    # torch's and transformers' own warnings: none is about what is tested here
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

STEPS = 2
LAYOUT = {"structure.stride", "structure.requires_grad", "logic.sign_of_zero"}
"""Details of findings about the layout alone: values agree."""

SAMPLE = {("gated", "bfloat16")}
"""What CI runs of it."""


def made(make: Callable[[], Case], precision: str) -> Case:
    torch.manual_seed(0)
    case = make()
    case.model.train()
    if precision == "autocast":
        return case
    case.model.bfloat16()
    inputs = {
        name: value.bfloat16() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for name, value in case.inputs.items()
    }
    return Case(case.model, inputs, case.loss)


def train(make: Callable[[], Case], precision: str, compiled: Callable[[nn.Module], Any]) -> list[torch.Tensor]:
    case = made(make, precision)
    model = compiled(case.model)
    optimizer = torch.optim.SGD(case.model.parameters(), lr=0.01)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16) if precision == "autocast" else nullcontext():
            loss = case.loss(model(**case.inputs))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *(parameter.detach() for parameter in case.model.parameters())]


def eager_repeats_itself(make: Callable[[], Case], precision: str) -> bool:
    one, other = (train(make, precision, lambda model: model) for _ in range(2))
    return all(map(torch.equal, one, other))


def has_numbers(tensors: list[torch.Tensor]) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in tensors)


def cases() -> list[Any]:
    return [
        pytest.param(
            make,
            precision,
            id=f"{make.__name__}-{precision}",
            marks=[pytest.mark.ci_sample] if (make.__name__, precision) in SAMPLE else [],
        )
        for make in MODELS
        for precision in ("bfloat16", "autocast")
    ]


@pytest.mark.parametrize(("make", "precision"), cases())
def test_clean_model_in_16_bits(make: Callable[[], Case], precision: str) -> None:
    report = gathered(lambda: train(make, precision, lambda model: checked(model, "inductor")))
    failing = {finding.kind for finding in report.findings if finding.fails}
    if failing == {cb.Kind.CRASH}:
        # The C++ that Inductor makes of some of these models does not compile on some processors: without a check too.
        with pytest.raises(RuntimeError, match="compile error"):
            train(make, precision, torch.compile)
        return
    if failing == {cb.Kind.NONFINITE}:
        # Inductor's gradient of amax is NaN in bfloat16: without a check too.
        assert not has_numbers(train(make, precision, torch.compile))
        assert has_numbers(train(make, precision, lambda model: model))
        return
    about_values = [finding for finding in report.findings if finding.detail not in LAYOUT]
    if report.verdict is cb.Verdict.INCONCLUSIVE:
        assert {finding.detail for finding in about_values} == {"nondeterministic"}, str(report)
        assert not eager_repeats_itself(make, precision), str(report)
        return
    assert not about_values, str(report)
    assert report.coverage.regions
    assert report.coverage.checked["gradients"] > 0
