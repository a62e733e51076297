"""Which setting is found, with compilers that heed the settings they are given."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from reduce_tools import trial_of

from checked_backend._torch import inductor_settings
from checked_backend.record import Finding, Kind
from checked_backend.reduce import COSTLY, SETTINGS, find_workaround, keep_out
from checked_backend.reduce.settings import applicable
from checked_backend.regions.trial import Trial

aten = torch.ops.aten

TRIAL = trial_of(lambda x: (aten.relu.default(x),), torch.ones(2), compiler="inductor")
WRONG = (Finding(Kind.LOGIC, "output[0]", "wrong"),)


def right_if(condition: Callable[[Mapping[str, Any]], bool], tried: list[Mapping[str, Any]]) -> Any:
    def judge(trial: Trial, _timeout: float) -> tuple[Finding, ...]:
        tried.append(trial.options.compiler_options)
        plain = trial.options.compiler == "inductor"
        return () if plain and condition(trial.options.compiler_options) else WRONG

    return judge


@pytest.mark.parametrize("patches", [{"pattern_matcher": False}, {"layout_optimization": False}, {"cpp.simdlen": 1}])
def test_the_one_setting_that_helps_is_found(patches: dict[str, Any]) -> None:
    tried: list[Mapping[str, Any]] = []
    judge = right_if(lambda options: patches.items() <= options.items(), tried)
    found = find_workaround(TRIAL, deadline=time.monotonic() + 300, judge=judge)
    assert found is not None
    assert found.code == f"torch.compile(model, options={patches!r})"
    assert len(tried) <= 10


def test_none_is_found_where_none_helps_or_there_is_no_time_or_the_compiler_has_none() -> None:
    tried: list[Mapping[str, Any]] = []
    never = right_if(lambda options: False, tried)
    assert find_workaround(TRIAL, deadline=time.monotonic() + 300, judge=never) is None
    assert len(tried) <= 2 + len(COSTLY)  # all cheap ones together, the operator's fallback, the costly ones
    always = right_if(lambda options: True, tried)
    assert find_workaround(TRIAL, deadline=time.monotonic(), judge=always) is None
    other = trial_of(lambda x: (aten.relu.default(x),), torch.ones(2))
    assert find_workaround(other, deadline=time.monotonic() + 300, judge=always) is None


def test_what_helps_the_small_program_must_help_the_region() -> None:
    region = trial_of(lambda x: (aten.neg.default(x),), torch.ones(2), compiler="inductor")

    def judge(trial: Trial, _timeout: float) -> tuple[Finding, ...]:
        options = trial.options.compiler_options
        small = trial.graph.code == TRIAL.graph.code
        return () if not options.get("reorder_for_locality", True) or (small and options) else WRONG

    found = find_workaround(TRIAL, deadline=time.monotonic() + 300, confirm=region, judge=judge)
    assert found is not None
    assert "reorder_for_locality" in found.code


def test_the_table_names_settings_that_exist() -> None:
    present = inductor_settings()
    unknown = {key for setting in (*SETTINGS, *COSTLY) for key in setting.patches if key not in present}
    # what another version of Inductor has is left out, not tried
    assert all(setting.patches.keys() <= present.keys() for setting in applicable([*SETTINGS, *COSTLY], TRIAL))
    assert len(unknown) <= 5


def test_the_last_resort_can_be_pasted() -> None:
    code = keep_out("aten.relu.default", "model.py:4 in forward: x = x.relu()").code
    names: dict[str, Any] = {"torch": torch}
    exec(code, names)
    assert torch.equal(names["eager_relu"](torch.tensor([-1.0, 2.0])), torch.tensor([0.0, 2.0]))
    assert "model.py:4" in code
