"""The function that is checked, and what it is called."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import checked_backend as cb
from checked_backend.checking.program import eager_function, function_name
from tests.support import faults
from tests.support.check_tools import agreed


class Net(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.relu()

    def scores(self, x: Tensor) -> Tensor:
        return x.sigmoid()

    @torch.compile
    def compiled(self, x: Tensor) -> Tensor:
        return x.tanh()


class Doubled:
    def __call__(self, x: Tensor) -> Tensor:
        return x


def step(x: Tensor, _scale: float = 1.0) -> Tensor:
    return x.sin()


def made() -> Callable[..., Any]:
    def inner(x: Tensor) -> Tensor:
        return x

    return inner


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (Net(), "Net"),
        (Net().scores, "Net.scores"),
        (step, "step"),
        (partial(partial(step, _scale=2.0)), "step"),
        (made(), "inner"),
        (lambda x: x, "<lambda>"),
        (Doubled(), "Doubled"),
        (torch.relu, "relu"),
        (eager_function(torch.compile(Net())), "Net"),
    ],
)
def test_names(function: Callable[..., Any], name: str) -> None:
    assert function_name(function).endswith(name)


def test_a_method_that_is_compiled_where_it_is_defined() -> None:
    agreed(cb.check(Net().compiled, (torch.randn(3),), compiler="eager"))


@pytest.mark.process
@pytest.mark.parametrize("isolate", [False, True])
def test_a_report_is_named_after_the_program_in_memory_and_on_disk(
    isolate: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CHECKED_BACKEND_REPORT_DIR", str(tmp_path))
    compiler = faults.one_element(0)
    report = cb.check(Net(), (torch.randn(3),), compiler=compiler, gradients=False, isolate=isolate, timeout=240)
    assert [finding.kind for finding in report.findings] == [cb.Kind.LOGIC], report.to_text(verbose=True)
    assert (report.title, str(report).splitlines()[1]) == ("Net", "Net: 1 finding")
    assert str(report.environment["compiled by"]).startswith("tests.support.")
    assert report.path.name.startswith("net-")
    assert cb.Report.from_json(report.path.read_text("utf-8")).title == "Net"
