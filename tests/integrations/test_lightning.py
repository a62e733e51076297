"""Lightning's callback. Where Lightning is not installed, a stand-in calls it in the order in which Lightning does."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import checked_backend as cb
from tests.support.faults import clean, wrong_value

REAL = importlib.util.find_spec("lightning") is not None


class Loggers(list[tuple[int, dict[str, float]]]):
    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        self.append((step, metrics))


@pytest.fixture
def callback(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    if not REAL:
        for name in ("lightning", "lightning.pytorch", "lightning.pytorch.callbacks"):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        sys.modules["lightning.pytorch.callbacks"].Callback = object  # type: ignore[attr-defined]
    name = "checked_backend.integrations.lightning"
    monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module(name).NumcheckCallback
    monkeypatch.delitem(sys.modules, name, raising=False)


def fit(callback: Any, compiler: Any, logger: Loggers) -> None:
    """What ``Trainer.fit`` does with a callback."""
    torch._dynamo.reset()
    layer = torch.nn.Linear(4, 2)
    trainer = SimpleNamespace(loggers=[logger], global_step=0)
    callback.setup(trainer, layer, stage="fit")
    options = {"compiler": compiler, "on_divergence": "record", "localize": False}
    compiled = torch.compile(layer, backend="numcheck", options=options)
    for index in range(3):
        compiled(torch.randn(3, 4)).sum().backward()
        trainer.global_step += 1
        callback.on_train_batch_end(trainer, layer, None, None, index)
    callback.teardown(trainer, layer, stage="fit")


def test_a_clean_fit_logs_its_checks_and_has_a_report(callback: Callable[..., Any]) -> None:
    made, logger = callback(), Loggers()
    fit(made, clean(), logger)
    assert made.report.verdict is cb.Verdict.PASS
    assert [step for step, _ in logger] == [1, 2, 3]
    assert all(metrics["numcheck/findings"] == 0 and metrics["numcheck/ratio"] <= 1 for _, metrics in logger)
    assert 0 < logger[-1][1]["numcheck/share"] <= 1
    again = Loggers()
    fit(made, clean(), again)  # the same callback in another fit
    assert (len(again), made.report.coverage.regions[0].calls) == (3, 3)


def test_a_wrong_fit_raises_at_its_end(callback: Callable[..., Any]) -> None:
    logger = Loggers()
    with pytest.raises(cb.DivergenceError):
        fit(callback(), wrong_value(), logger)
    assert logger[-1][1]["numcheck/findings"] >= 3
    quiet = callback(raises=False)
    fit(quiet, wrong_value(), Loggers())
    assert quiet.report.verdict is cb.Verdict.FAIL


def test_an_exception_ends_the_report(callback: Callable[..., Any]) -> None:
    made = callback()
    made.setup(None, None)
    made.on_exception(None, None, ValueError())
    assert made.report is not None
    made.teardown(None, None)
