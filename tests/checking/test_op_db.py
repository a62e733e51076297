"""A sample of torch's ``op_db`` through `check`; ``python -m tests.op_db check`` runs all of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("expecttest", reason="torch's own test data need it")

import checked_backend as cb
from tests.op_db.check import check_sample, interesting, known, summary, sweep
from tests.op_db.entries import name_of, operators
from tests.op_db.results import read

SECONDS = 40
OF_THE_LIST = pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="the list is of torch 2.13")


def test_a_sample_has_no_internal_error_and_no_fail_that_is_not_known(tmp_path: Path) -> None:
    results = list(sweep(tmp_path / "results.jsonl", seconds=SECONDS, samples=1, every=120))
    assert results
    assert [result for result in results if result["errors"]] == []
    listed = {(fail["name"], fail["dtype"], fail["detail"]) for fail in known()["fails"]}
    told = {(result["name"], result["dtype"], fail["detail"]) for result in results for fail in result["fails"]}
    if torch.__version__.startswith(known()["torch"]):
        assert told <= listed
    verdicts = [result["verdicts"] for result in results]
    assert sum(sum(one.values()) for one in verdicts) == len(results)


def test_a_later_run_goes_on_and_a_death_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    (first,) = sweep(path, seconds=SECONDS, samples=1, every=700, dtypes=("int64",))
    assert first["verdicts"] == {"pass": 1}
    assert list(sweep(path, seconds=SECONDS, samples=1, every=700, dtypes=("int64",))) == []
    (more,) = sweep(path, seconds=SECONDS, samples=2, every=700, dtypes=("int64",))
    assert (more["name"], more["from"], sum(more["verdicts"].values())) == (first["name"], 1, 1)
    with path.open("a") as file:
        file.write('{"begun": true, "name": "killer", "dtype": "int64", "from": 3, "to": 3}\n{"name": "cut o')
    (died,) = sweep(path, seconds=SECONDS, samples=2, every=700, dtypes=("int64",))
    assert (died["name"], died["errors"][0]["error"]) == ("killer", "the process died")
    assert interesting(died)
    assert not interesting(more)
    assert read(path)[-1] == died
    assert "'errors': 1" in summary(path)


@pytest.mark.more
@OF_THE_LIST
def test_each_known_fail_has_a_reason_and_is_found_again() -> None:
    fails = known()["fails"]
    assert all(fail["reason"] for fail in fails)
    listed = {(fail["name"], fail["dtype"], fail["detail"]) for fail in fails}
    for fail in fails:
        if fail["dtype"] != "float32":  # the same ones
            assert (fail["name"], "float32", fail["detail"]) in listed
            continue
        info = next(info for info in operators() if name_of(info) == fail["name"])
        torch.manual_seed(0)
        samples = list(info.sample_inputs("cpu", torch.float32, requires_grad=True))
        report = check_sample(info, samples[fail["sample"]], gradients=True)
        assert fail["detail"] in [finding.detail for finding in report.findings]


@OF_THE_LIST
def test_each_inconclusive_verdict_has_a_reason_that_says_why() -> None:
    assert known()["least samples of an operator and dtype"] == "all"
    listed = known()["inconclusive"]
    assert sum(entry["samples"] for entry in listed) <= known()["samples"]["inconclusive"] * 2
    for listed_one in listed:
        reason = listed_one["reason"]
        dynamo = reason.startswith("the compiled program: Dynamo compiled no region of it: ") and len(reason) > 80
        assert dynamo or reason.startswith("nondeterministic: eager does not repeat itself"), reason
        assert listed_one["operators"]


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_compressed_sparse_inputs_are_copied() -> None:
    matrix = torch.eye(3).to_sparse_csr()
    report = cb.check(lambda m, v: m @ v, (matrix, torch.ones(3)), compiler="eager", gradients=False)
    assert report.verdict is not cb.Verdict.FAIL, str(report)
