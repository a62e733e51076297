"""Other random numbers are one finding that names what follows from them; an error beside them is another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from tests.support import faults
from tests.support.region_tools import checked, found, gathered


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        hidden = F.dropout(torch.tanh(self.first(x)), 0.5)
        return hidden, self.second(hidden), torch.sin(x)


def train(compiler: faults.Compiler) -> None:
    compiled = checked(Net(), compiler)
    for _ in range(2):
        hidden, result, _ = compiled(torch.ones(6, 5))
        (hidden.square().sum() + result.square().sum()).backward()


def test_what_follows_from_other_random_numbers_is_one_finding() -> None:
    report = gathered(lambda: train(faults.other_random_numbers("aot")))
    [finding] = [one for one in report.findings if one.detail == "rng.stream"]
    explained = {finding.subject, *finding.explains}
    assert finding.evidence["explains"] == finding.explains
    assert {"output[0]", "output[1]", "grad[second.weight]", "grad[first.weight]"} <= explained
    assert "output[2]" not in explained
    assert {detail for detail, _ in found(report)} <= {"rng.stream", "rng.state"}
    assert "grad[second.weight]" in " ".join(report.to_text(verbose=True).split())


def test_an_error_beside_other_random_numbers_is_not_folded() -> None:
    def wrong(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        run = faults.other_random_numbers()(gm, example_inputs)

        def call(*args: Any) -> Any:
            first, second, third = run(*args)
            return first, second, third * 1.01

        return call

    report = gathered(lambda: checked(Net(), wrong)(torch.ones(6, 5)))
    subjects = {subject for detail, subject in found(report) if not detail.startswith("rng")}
    assert subjects == {"output[2]"}, str(report)
