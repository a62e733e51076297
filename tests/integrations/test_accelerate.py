"""Accelerate's plugin: what it hands to ``torch.compile``, and that this checks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.backends import registry

import checked_backend as cb
from tests.support.faults import wrong_value

pytest.importorskip("accelerate")

from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import TorchDynamoPlugin

from checked_backend.integrations.accelerate import NumcheckPlugin, use_numcheck


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
        monkeypatch.delenv(name)
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def handed(plugin: Any) -> tuple[dict[str, Any], dict[str, Any], str | None]:
    """The rest of the arguments, the options of numcheck, and the mode."""
    kwargs = plugin.to_kwargs()
    backend = kwargs.pop("backend")
    return kwargs, backend.keywords["options"], backend.keywords["mode"]


def test_what_the_code_names_is_what_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert handed(NumcheckPlugin()) == ({}, {"compiler": "inductor", "compiler_options": {}}, None)
    plugin = NumcheckPlugin(backend="aot_eager", fullgraph=True, check={"every": 3})
    assert handed(plugin) == ({"fullgraph": True}, {"every": 3, "compiler": "aot_eager", "compiler_options": {}}, None)
    assert handed(NumcheckPlugin(mode="max-autotune", dynamic=True, options={"epilogue_fusion": False})) == (
        {"dynamic": True},
        {"compiler": "inductor", "compiler_options": {"epilogue_fusion": False}},
        "max-autotune",
    )
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "EAGER")
    assert handed(NumcheckPlugin())[1]["compiler"] == "eager"


def step(accelerator: Accelerator) -> None:
    accelerator.backward(accelerator.prepare(torch.nn.Linear(4, 2))(torch.ones(3, 4)).sum())


def test_an_existing_accelerator_keeps_its_backend() -> None:
    accelerator = Accelerator(cpu=True, dynamo_plugin=TorchDynamoPlugin(backend="aot_eager", dynamic=True))
    use_numcheck(accelerator, {"on_divergence": "record"})
    kwargs, options, _ = handed(accelerator.state.dynamo_plugin)
    assert (kwargs, options["compiler"]) == ({"dynamic": True}, "aot_eager")
    with cb.collect(closing=False) as session:
        step(accelerator)
    assert session.report.coverage.regions[0].checked_calls == 1


def test_a_wrong_backend_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._COMPILER_FNS, "tvm", wrong_value())  # one of the names that accelerate knows
    check = {"on_divergence": "record", "localize": False}
    with cb.collect(closing=False) as session:
        step(Accelerator(cpu=True, dynamo_plugin=NumcheckPlugin(backend="tvm", check=check)))
    assert session.report.verdict is cb.Verdict.FAIL
