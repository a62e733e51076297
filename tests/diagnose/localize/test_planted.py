"""Faults planted inside Inductor: they can be planted and taken out again, and the operator is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch._inductor import config, decomposition, lowering
from torch.utils import _pytree as pytree

from tests.diagnose.localize import sweep_planted
from tests.support.planted import FAULTS, planted
from tests.support.programs import PROGRAMS


def test_every_fault_has_a_program_that_runs_in_eager() -> None:
    assert set(PROGRAMS) == set(FAULTS)
    for program in PROGRAMS.values():
        results = pytree.tree_leaves(program.run(*program.inputs()))
        assert all(isinstance(result, torch.Tensor) for result in results)
        assert any(result.requires_grad for result in results) == program.train


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_taken_out_again(name: str) -> None:
    if (name, torch.__version__[:5]) == ("max_pool2d_with_indices_backward", "2.11."):
        pytest.skip("torch 2.11 lowers this operator; what is planted is a decomposition")

    def state() -> tuple[dict[object, object], dict[object, object], object]:
        flag = config.cpp.inject_relu_bug_TESTING_ONLY
        return dict(lowering.lowerings), dict(decomposition.decompositions), flag

    def fails() -> None:
        with planted(name):
            seen.append(state())
            raise KeyError("on purpose")

    before, seen = state(), list[object]()
    with pytest.raises(KeyError, match="on purpose"):
        fails()
    assert seen != [before]
    assert state() == before


@pytest.mark.slow
@pytest.mark.parametrize("name", ["inject_relu", pytest.param("addmm_fused", marks=pytest.mark.ci_sample)])
def test_the_planted_operator_is_named(name: str, tmp_path: Path) -> None:
    result = sweep_planted.one(name, "small", quick=True)
    assert result.get("right"), json.dumps(result)
    assert (result["stage"], result["graph"]) == ("compiled", "inference")
    assert result["cut"] <= 5


def test_every_model_has_faults_of_its_own() -> None:
    assert set(sweep_planted.HOMES) == set(sweep_planted.MODELS)
    for homes in sweep_planted.HOMES.values():
        assert len(homes) >= 8
        assert set(homes) <= set(FAULTS)


def test_the_table_of_the_sweep_is_about_these_faults() -> None:
    table = Path(sweep_planted.__file__).with_name("planted_quick.jsonl")
    lines = [json.loads(line) for line in table.read_text(encoding="utf-8").splitlines()]
    small = {line["fault"]: line for line in lines if line["on"] == "small"}
    assert set(small) == set(FAULTS)
    named = [sweep_planted.names_it(line["op"], line["fault"]) for line in small.values() if "op" in line]
    assert sum(named) >= 0.9 * len(FAULTS)
    assert all(line["cut"] <= 5 for line in small.values() if line.get("cut") is not None)


def test_the_table_of_repros_is_of_small_ones_that_were_confirmed() -> None:
    table = Path(sweep_planted.__file__).with_name("planted_full.jsonl")
    lines = [json.loads(line) for line in table.read_text(encoding="utf-8").splitlines()]
    assert {line["on"] for line in lines} >= set(sweep_planted.MODELS)
    shown = [line for line in lines if "op" in line]
    named = [sweep_planted.names_it(line["op"], line["fault"]) for line in shown]
    assert sum(named) >= 0.9 * len(shown)
    assert all(line["confirmed"] and 1 <= line["calls"] <= 5 for line in shown)
