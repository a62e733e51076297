"""The main job: models that people train, in each precision, and no false alarm."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch._functorch.config

import checked_backend as cb
from tests.support.models import Case, resnet
from tests.support.more_models import HALF, HUGGING_FACE
from tests.support.region_tools import backwards, checked, gathered

MODELS = {**HUGGING_FACE, **HALF, "resnet": resnet}
STEPS = 2


def around(device: str, precision: str) -> AbstractContextManager[Any]:
    if precision in ("autocast", "float16 scaled"):
        return torch.autocast(device, torch.bfloat16 if precision == "autocast" else torch.float16)
    return nullcontext()


def train(make: Callable[[], Case], device: str, precision: str, compiled: Callable[[Any], Any]) -> None:
    torch.manual_seed(0)
    case = make().to(device, torch.bfloat16 if precision == "bfloat16" else None)
    case.model.train()
    model = compiled(case.model)
    optimizer = torch.optim.SGD(case.model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler(device, enabled=precision == "float16 scaled")
    for _ in range(STEPS):
        optimizer.zero_grad()
        with around(device, precision):
            loss = case.loss(model(**case.inputs))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


@pytest.fixture
def _no_cached_graphs() -> Iterator[None]:
    """Torch 2.11 takes AOT autograd's graph of float16 for bfloat16 out of its cache: its key has no autocast dtype."""
    with torch._functorch.config.patch(enable_autograd_cache=False):
        yield


@pytest.mark.usefixtures("_no_cached_graphs")
@pytest.mark.parametrize("precision", ["float32", "tf32", "bfloat16", "float16 scaled", "autocast"])
@pytest.mark.parametrize("name", ["bert", "gpt2", "resnet", "unet", "llama", "mixtral"])
def test_training_is_not_accused(name: str, precision: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if precision == "tf32":
        if device == "cpu":
            pytest.skip("needs a GPU: a processor has no TF32")
        monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", True)
        monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    report = gathered(lambda: train(MODELS[name], device, precision, lambda model: checked(model, "inductor")))
    assert report.verdict is not cb.Verdict.FAIL, str(report)
    if report.verdict is cb.Verdict.INCONCLUSIVE:  # atomics: eager itself does not repeat
        assert {finding.detail for finding in report.findings} == {"nondeterministic"}, str(report)
    assert backwards(report) > 0, str(report)
    if precision not in ("float32", "tf32"):
        assert report.coverage.checked["operators"] > 0, report.to_text(verbose=True)
