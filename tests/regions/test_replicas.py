"""Parameters that are equal on all ranks are compared at the same moments of the run: here two ranks in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from checked_backend.findings import Finding, Skip
from checked_backend.regions import replicas
from checked_backend.regions.replicas import Moments, Replicas

NAMES = ("x", "weight", "bias")


class Told:
    """Receives what is found on one rank."""

    def __init__(self) -> None:
        self.call = 0
        self.findings: list[Finding] = []
        self.skips: list[Skip] = []
        self.compared = 0

    def report(self, findings: list[Finding]) -> None:
        self.findings += findings

    def count(self, checked: dict[str, int]) -> None:
        self.compared += sum(checked.values())

    def skip(self, skip: Skip) -> None:
        self.skips.append(skip)


class Rank:
    """One rank with a model of its own."""

    def __init__(self, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.number = number
        self.told = Told()
        self.moments = Moments()
        self.model = self.made()
        self._regions: dict[str, Replicas] = {}
        self._calls: dict[str, int] = {}
        self._monkeypatch = monkeypatch

    @staticmethod
    def made() -> nn.Linear:
        torch.manual_seed(0)
        return nn.Linear(4, 4)

    def compiled_anew(self) -> None:
        self._regions.clear()
        self._calls.clear()

    def call(self, region: str = "Net [0/0]") -> None:
        function = region.partition(" [")[0]
        told: Any = self.told
        checked = self._regions.setdefault(region, Replicas(function, told, self.moments))
        self._calls[region] = self._calls.get(region, 0) + 1
        self._monkeypatch.setattr(replicas, "process_rank", lambda: self.number)
        checked.compare(self._calls[region], (torch.ones(4), *self.model.parameters()), NAMES)

    def update(self) -> None:
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.mul_(0.9).add_(0.01)


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> tuple[Rank, Rank]:
    store = dist.HashStore()
    monkeypatch.setattr(replicas, "default_store", lambda: store)
    monkeypatch.setattr(replicas, "distributed_is_on", lambda: True)
    return Rank(0, monkeypatch), Rank(1, monkeypatch)


def trained(ranks: tuple[Rank, Rank], steps: int, evaluations: int = 0) -> None:
    for step in range(steps):
        for rank in ranks:
            for _ in range(1 + (evaluations if not rank.number and step % 3 == 1 else 0)):
                rank.call()
            rank.update()


def test_a_rank_that_evaluates_more_often_is_compared_at_the_same_moments(ranks: tuple[Rank, Rank]) -> None:
    trained(ranks, 40, evaluations=3)
    assert not ranks[1].told.findings
    assert not ranks[1].told.skips
    assert ranks[1].told.compared >= 2 * 5


def test_a_rank_that_compiles_anew_at_another_step_is_not_accused(ranks: tuple[Rank, Rank]) -> None:
    for step in range(40):
        for rank in ranks:
            rank.call("Net [0/1]" if step % (3 + rank.number) == 2 else "Net [0/0]")
            rank.update()
    assert not ranks[1].told.findings
    assert ranks[1].told.compared >= 2 * 5


def test_another_model_of_the_same_name_is_not_held_against_the_first(ranks: tuple[Rank, Rank]) -> None:
    trained(ranks, 3)
    for rank in ranks:
        rank.model = rank.made()
        rank.compiled_anew()
    with torch.no_grad():
        ranks[0].model.weight.mul_(2)
        ranks[1].model.weight.mul_(2)
    trained(ranks, 9)
    assert not ranks[1].told.findings
    assert ranks[1].told.compared > 2 * 5


def test_a_checkpoint_that_one_rank_alone_has_loaded_changes_no_moment(ranks: tuple[Rank, Rank]) -> None:
    ranks[0].model.load_state_dict(ranks[1].model.state_dict())
    trained(ranks, 9)
    assert not ranks[1].told.findings
    assert ranks[1].told.compared >= 2 * 4


@pytest.mark.parametrize("steps", [0, 5])
def test_one_parameter_that_drifts_is_found(ranks: tuple[Rank, Rank], steps: int) -> None:
    trained(ranks, steps)
    with torch.no_grad():
        ranks[1].model.weight[0, 0] *= 1 + 2.0**-22
    trained(ranks, 12)
    assert [finding.subject for finding in ranks[1].told.findings] == ["param[weight]"]
    assert not ranks[0].told.findings


def test_a_parameter_of_another_sign_is_found(ranks: tuple[Rank, Rank]) -> None:
    ranks[1].model.weight.data.neg_()
    trained(ranks, 2)
    assert [finding.subject for finding in ranks[1].told.findings] == ["param[weight]"]


def test_a_rank_that_alone_writes_to_all_parameters_is_told(ranks: tuple[Rank, Rank]) -> None:
    trained(ranks, 3)
    with torch.no_grad():
        for parameter in ranks[1].model.parameters():
            parameter.add_(0.01)
    trained(ranks, 1200)
    assert not ranks[1].told.findings
    assert len(ranks[1].told.skips) == 1
    assert ranks[1].told.skips[0].matters
    assert "not written to them equally often" in ranks[1].told.skips[0].reason
