"""Kernels that torch takes out of its caches, and that an earlier run has checked."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import fx
from torch._inductor import config

import checked_backend as cb
from checked_backend._torch.caches import without_compile_caches
from checked_backend.regions.operator_check import check, earlier_runs
from checked_backend.regions.operator_check.earlier_runs import EarlierRuns
from checked_backend.regions.operator_check.tensor_checks import NO_ERROR, TensorChecks, Wrong
from tests.regions.operator_check.test_in_place import in_half_precision, inputs, program
from tests.support.planted import Fault, planted
from tests.support.region_tools import checked, gathered

pytestmark = [pytest.mark.inductor]


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the runs of a test keep what they have found out."""
    monkeypatch.setattr(earlier_runs, "compile_cache_folder", lambda: tmp_path)
    return tmp_path / earlier_runs._FOLDER


def run(*, dynamic: bool | None = None) -> cb.Report:
    torch._dynamo.reset()
    torch.manual_seed(0)
    compiled = checked(program, "inductor", dynamic=dynamic)
    return gathered(lambda: compiled(*inputs()).sum().backward())


def is_recalled(report: cb.Report) -> bool:
    assert report.verdict is cb.Verdict.PASS, report.to_text()
    told = any("checked earlier" in skip.reason for skip in report.coverage.skipped)
    assert told is (report.coverage.checked["operators"] == 0)
    return told


def test_what_an_earlier_run_has_checked_is_not_checked_again() -> None:
    first, second = run(), run()
    assert (is_recalled(first), is_recalled(second)) == (False, True)
    assert second.coverage.own_precision_limit == first.coverage.own_precision_limit


def test_other_kernels_are_checked() -> None:
    run()
    with planted(Fault("tanh", "pointwise", "lowering", in_half_precision)), without_compile_caches():
        report = run()
    assert "torch.tanh" in {finding.op for finding in report.findings}, report.to_text()
    assert is_recalled(run())  # a wrong kernel leaves nothing behind


def test_a_wrong_kernel_is_found_in_each_run() -> None:
    with planted(Fault("tanh", "pointwise", "lowering", in_half_precision)), without_compile_caches():
        for _ in range(2):
            assert run().verdict is cb.Verdict.FAIL


def test_what_is_wrong_with_later_values_is_forgotten(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_recalled(run())
    assert len([*kept.iterdir()]) == 1
    monkeypatch.setattr(EarlierRuns, "limits", lambda *_: None)
    wrong = Wrong(fx.Graph().placeholder("x"), NO_ERROR, torch.ones(1), torch.ones(1))
    monkeypatch.setattr(check, "findings_of", lambda *_: [])
    monkeypatch.setattr(check, "of_region", lambda *_: TensorChecks(wrong=[replace(wrong, gradient=True)]))
    run()
    assert not [*kept.iterdir()]


def test_other_options_are_other_kernels(kept: Path) -> None:
    EarlierRuns("one").remember(["a module"], {})
    assert EarlierRuns("one").limits(["a module"]) == {}
    assert EarlierRuns("other").limits(["a module"]) is None
    assert EarlierRuns("one").limits(["another module"]) is None
    with config.patch({"cpp.simdlen": 1}):
        assert EarlierRuns("one").limits(["a module"]) is None
    EarlierRuns("one").forget(["a module"])
    assert EarlierRuns("one").limits(["a module"]) is None
    assert not [*kept.iterdir()]


def test_who_asks_for_a_check_gets_one() -> None:
    for _ in range(2):
        torch._dynamo.reset()
        report = cb.check(program, inputs(), compiler="inductor", localize=False)
        assert report.coverage.checked["operators"] > 12


def test_kernels_for_all_sizes_are_checked_at_each(kept: Path) -> None:
    assert not any(is_recalled(run(dynamic=True)) for _ in range(2))
    assert not kept.exists()


@pytest.mark.parametrize("content", [b"", b"[]", b'{"output[0]": "x"}', b'{"output[0]": NaN}', b"[" * 10_000, b"\xff"])
def test_a_file_that_says_nothing_is_not_believed(kept: Path, content: bytes) -> None:
    earlier, texts = EarlierRuns(""), ["a module"]
    earlier.remember(texts, {"output[0]": 0.01})
    assert earlier.limits(texts) == {"output[0]": 0.01}
    [file] = kept.iterdir()
    file.write_bytes(content)
    assert earlier.limits(texts) is None


def test_where_nothing_can_be_written_the_next_run_checks_again(kept: Path) -> None:
    kept.write_text("a file, no folder")
    EarlierRuns("").remember(["a module"], {})
    assert EarlierRuns("").limits(["a module"]) is None
