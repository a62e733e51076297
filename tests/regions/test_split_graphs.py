"""Graphs that Dynamo splits between the buckets of a DistributedDataParallel module, here with a group of one rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import checked_backend as cb
from tests.support import faults
from tests.support.region_tools import checked, gathered


@pytest.fixture(autouse=True)
def _small_buckets(one_rank: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "_DEFAULT_FIRST_BUCKET_BYTES", 256)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(torch.tanh(self.second(torch.nn.functional.gelu(self.first(x)))))


def trained(compile_: Any, steps: int = 2) -> list[torch.Tensor | None]:
    torch.manual_seed(0)
    model = Net()
    run = compile_(nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.0005))
    for number in range(steps):
        run(torch.full((3, 8), 0.5 + number)).square().sum().backward()
    return [parameter.grad for parameter in model.parameters()]


def test_each_part_of_a_split_graph_is_checked() -> None:
    plain = trained(lambda module: torch.compile(module, backend="aot_eager"))
    torch._dynamo.reset()
    kept: list[Any] = []
    report = gathered(lambda: kept.extend(trained(lambda module: checked(module, "aot_eager"))))
    assert report.verdict is cb.Verdict.PASS, str(report)
    regions = report.coverage.regions
    names = [region.name.partition(" from ")[2] for region in regions]
    assert names == ["first.weight", "second.weight", "third.weight"]
    assert all((region.calls, region.checked_calls, region.checked_backwards) == (2, 2, 2) for region in regions)
    assert all(map(torch.equal, kept, plain))


def test_an_error_in_a_part_of_a_split_graph_is_found_there() -> None:
    wrong = faults.wrong_operator("aten.tanh.default", how="aot")
    report = gathered(lambda: trained(lambda module: checked(module, wrong)))
    assert "logic" in {finding.detail for finding in report.findings}
    [finding] = [finding for finding in report.findings if finding.subject == "output[0]"]
    assert finding.region.endswith(" from second.weight")
