"""A sample of torch's ``op_db``; ``python -m tests.op_db metadata`` runs all of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("expecttest", reason="torch's own test data need it")

from tests.op_db.entries import name_of, operators
from tests.op_db.metadata import KNOWN, run_sample, sweep
from tests.op_db.results import read

SECONDS = 60


def known() -> dict[str, Any]:
    return json.loads(KNOWN.read_text(encoding="utf-8"))


@pytest.mark.process
def test_a_sample_has_no_internal_error_and_no_mismatch_that_is_not_known(tmp_path: Path) -> None:
    results = list(sweep(tmp_path / "results.jsonl", seconds=SECONDS, samples=1, every=40))
    assert len(results) >= 5
    assert [result for result in results if result.get("errors")] == []
    listed = {(bug["op"], bug["detail"]) for bug in known()["bugs"]}
    told = {(mismatch["op"], mismatch["detail"]) for result in results for mismatch in result["mismatches"]}
    if torch.__version__.startswith(known()["torch"]):
        assert told <= listed
    assert sum(result.get("ran", 0) for result in results) >= len(results) // 2


@pytest.mark.process
def test_a_later_run_goes_on_where_the_file_ends(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    first = next(sweep(path, seconds=SECONDS, samples=1, every=200))
    path.write_text(path.read_text() + '{"name": "cut o')
    path.write_text(path.read_text() + "\n")
    assert [result["name"] for result in read(path)] == [first["name"]]
    rest = [result["name"] for result in sweep(path, seconds=SECONDS, samples=1, every=200)]
    assert first["name"] not in rest
    assert [first["name"], *rest] == [name_of(info) for info in operators()[::200]]


@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="the list is of torch 2.13")
def test_a_known_bug_is_found_again() -> None:
    info = next(info for info in operators() if name_of(info) == "nn.functional.channel_shuffle")
    bug = next(bug for bug in known()["bugs"] if bug["op"] == "aten.channel_shuffle.default")
    sample = next(s for s in info.sample_inputs("cpu", torch.float32) if s.input.ndim == 4 and s.input.shape[1] > 1)
    pictures = sample.transform(lambda t: t.to(memory_format=torch.channels_last) if getattr(t, "ndim", 0) == 4 else t)
    outcome, findings = run_sample(info, pictures)
    assert outcome == "ran"
    assert bug["detail"] in [finding.detail for finding in findings if not isinstance(finding, str)]
