"""A small record of each check over time, with drifts before they are findings."""

from __future__ import annotations

import importlib.util
import itertools
import json
import runpy
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import checked_backend as cb
from checked_backend.regions.health import Health, RegionHealth
from tests.support.raising import raising
from tests.support.region_tools import agreed, checked, gathered


def growing(rate: float) -> Callable[..., Any]:
    """A compiler whose results are off by a little more at each call, from about the size of the noise on."""

    def compiler(gm: torch.fx.GraphModule, _inputs: Sequence[Any]) -> Callable[..., Any]:
        calls = itertools.count()

        def run(*args: Any) -> Any:
            (result,) = gm.forward(*args)
            off = 2.0**-26 + rate * next(calls)
            return (result + off * result.detach().abs().max() * torch.sign(result.detach()),)

        return run

    return compiler


def program(compiler: Any, count: int, **options: Any) -> cb.Report:
    torch.manual_seed(0)
    compiled = checked(torch.nn.Linear(32, 16), compiler, **options)

    def run() -> None:
        for number in range(count):
            compiled(torch.randn(8, 32, generator=torch.Generator().manual_seed(number))).square().sum().backward()

    return gathered(run)


def test_each_checked_call_and_backward_pass_gives_a_record() -> None:
    records: list[cb.CheckRecord] = []
    with cb.on_check(records.append):
        program("eager", 3, every=2)
    told = [(one.call, one.step, one.backward) for one in records]
    assert told == [(call, call, backward) for call in (1, 3) for backward in (False, True)]
    assert {one.ratio for one in records} == {0.0}
    assert all(0 < one.share <= 1 and one.seconds > 0 and one.findings == 0 for one in records)
    [region] = {one.region for one in records}
    assert region.endswith("[0/0]")
    assert {one.rank for one in records} == {None}


def test_a_callback_may_call_the_compiled_program() -> None:
    layer = torch.nn.Linear(4, 4)
    compiled, x = checked(layer, "aot_eager"), torch.randn(2, 4)
    records: list[cb.CheckRecord] = []

    def again(record: cb.CheckRecord) -> None:
        records.append(record)
        assert torch.equal(compiled(x), layer(x))

    with cb.on_check(again):
        report = gathered(lambda: [compiled(x) for _ in range(2)])
    agreed(report)
    assert [record.call for record in records] == [1, 3]
    assert report.coverage.regions[0].checked_calls == 4


def test_a_handle_ends_it() -> None:
    records: list[cb.CheckRecord] = []
    handle = cb.on_check(records.append)
    handle.remove()
    handle.remove()
    program("eager", 1)
    assert not records


def test_noise_has_a_ratio_of_about_one_and_an_error_a_large_one_before_it_raises() -> None:
    records: list[cb.CheckRecord] = []
    with cb.on_check(records.append):
        program(growing(0.0), 6, gradients=False)
    assert all(0 < one.ratio <= 4 for one in records)
    assert {one.subject for one in records} == {"output[0]"}
    assert not any(one.drift for one in records)
    torch._dynamo.reset()
    with cb.on_check(records.append), pytest.raises(cb.DivergenceError):
        program(growing(1e-2), 3, on_divergence="raise", gradients=False)
    assert records[-1].ratio > 100
    assert records[-1].findings == 1


def test_a_drift_is_told_before_it_is_a_failure() -> None:
    records: list[cb.CheckRecord] = []
    with cb.on_check(records.append):
        report = program(growing(2.0**-29), 40, gradients=False)
    assert report.verdict is cb.Verdict.PASS, str(report)
    told = [one for one in records if one.drift]
    assert told[0].drift >= 3
    assert told[0].subject == "output[0]"


def test_what_a_callback_raises_ends_nothing_and_is_told(caplog: pytest.LogCaptureFixture) -> None:
    records: list[cb.CheckRecord] = []
    with cb.on_check(raising(ValueError("no disk"))), cb.on_check(records.append):
        report = program("eager", 1)
    assert len(records) == 2
    assert any("on_check raised: ValueError: no disk" in note for note in report.coverage.notes)
    assert "no disk" in caplog.text


def test_the_share_is_that_of_all_regions_since_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("checked_backend.regions.health.time", SimpleNamespace(perf_counter=lambda: now[0]))
    health = Health()
    records: list[cb.CheckRecord] = []
    health.add(records.append)
    one, other = (RegionHealth(name, lambda _note: None, health) for name in ("one", "other"))
    now[0] = 110.0
    one.checked(1, {"output[0]": 0.5, "output[1]": 0.25}, (), 1.0)
    now[0] = 120.0
    other.checked(1, {}, (), 1.0)
    told = [(record.share, record.ratio, record.subject) for record in records]
    assert told == [(0.1, 0.5, "output[0]"), (0.1, None, "")]


@pytest.mark.parametrize(
    ("ratios", "tells"),
    [
        ([1.0] * 8 + [4.0] * 8, True),
        ([1.0] * 8 + [1.0, 4.0] * 8, False),  # data that take turns
        ([0.01] * 8 + [0.1] * 16, False),  # far within the noise
        ([0.0] * 40, False),
        ([1.0] * 7 + [4.0] * 30, False),  # they were among the first
        ([float("inf")] * 30, False),
    ],
)
def test_only_what_grew_and_stays_is_a_drift(ratios: list[float], tells: bool) -> None:
    records: list[cb.CheckRecord] = []
    health = Health()
    health.add(records.append)
    region = RegionHealth("one", lambda _note: None, health)
    for call, ratio in enumerate(ratios, 1):
        region.checked(call, {"output[0]": ratio}, (), 0.0)
    assert any(record.drift for record in records) is tells


def test_the_example_writes_a_line_for_each_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    example = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "health.py"))
    lines = example["main"](tmp_path, steps=2, compiler="eager").read_text().splitlines()
    assert [json.loads(line)["call"] for line in lines] == [1, 1, 2, 2]
