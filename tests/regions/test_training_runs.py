"""Whole training runs leave the same bits behind, checked or not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import checked_backend as cb
from tests.support.ranks import run_ranks, values_of
from tests.support.region_tools import checked, gathered
from tests.support.training_runs import RUNS, Compile, Left


def _both(run: Callable[[Compile], Left], compiler: str) -> tuple[Left, Left, cb.Report]:
    """What a run leaves, unchecked and checked, and what the check says."""
    left: list[Left] = []

    def ran(compile_: Compile) -> None:
        torch._dynamo.reset()
        torch.manual_seed(3)
        left.append(run(compile_))

    ran(lambda function: torch.compile(function, backend=compiler))
    report = gathered(lambda: ran(lambda function: checked(function, compiler)))
    return left[0], left[1], report


@pytest.mark.slow
@pytest.mark.ci_sample
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.__name__)
def test_a_checked_run_leaves_the_same_bits(run: Callable[[Compile], Left]) -> None:
    plain, watched, report = _both(run, "aot_eager")
    assert report.verdict is cb.Verdict.PASS, str(report)
    assert report.coverage.checked["outputs"] + report.coverage.checked.get("mutated inputs", 0) > 0
    assert report.coverage.checked["tensors"] > 6
    assert len(plain) == len(watched)
    for one, other in zip(plain, watched, strict=True):
        assert torch.equal(one, other)


@pytest.mark.slow
@pytest.mark.ci_sample
def test_pipelines_and_split_graphs_leave_the_same_weights_on_each_rank(tmp_path: Path) -> None:
    programs: list[tuple[str, dict[str, Any]]] = [
        ("piped", {"handmade": True}),
        ("piped", {"handmade": False}),
        ("alike", {"kind": "split ddp", "steps": 4}),
    ]
    ranks = values_of(run_ranks("tests.support.rank_programs:several", tmp_path, programs=programs))
    for told in [told for rank in ranks for told in rank]:
        assert told["verdict"] == "pass", told["text"]
        assert told["equal"]
        assert told["checked"]["gradients"] > 0
    assert all(rank[2]["regions"] > 1 for rank in ranks)
