"""A sweep from beginning to end, with a runner whose answers are known."""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from checked_backend import SuiteError, Verdict
from checked_backend.process.job import JobResources
from checked_backend.runs.case import CaseResult
from checked_backend.runs.data import render_json, render_junit
from checked_backend.runs.page import render_html
from checked_backend.runs.pool import LocalPool
from checked_backend.runs.results import Results
from checked_backend.runs.summary import Summary, summarize
from checked_backend.runs.text import render_text
from checked_backend.sweep import drive
from checked_backend.sweep.drive import merge, modules_of, run_sweep, statuses_of, warm_process
from checked_backend.sweep.plan import SweepJob
from checked_backend.sweep.rules import Settings
from tests.support.sweep_tools import asked, jobs_of, outcome, plan_of, scripted, swept

MODELS = ("a", "b", "c", "d")
FAILED = statuses_of(["failed"])


def sweep(
    folder: Path,
    answers: dict[str, Sequence[str] | str],
    jobs: Sequence[SweepJob] = jobs_of(*MODELS),
    source: str = "a",
    **values: object,
) -> tuple[Summary, list[str]]:
    return swept(folder, plan_of(jobs, source), answers, **values)


def summary_in(path: Path) -> Summary:
    with Results(path) as results:
        return summarize(results)


def by_model(summary: Summary) -> dict[str, str]:
    return {case.case.model: case.status.value for case in summary.cases}


def test_all_is_run_once_and_then_never_again(tmp_path: Path) -> None:
    first, ran = sweep(tmp_path, {"b": "fail"})
    assert ran == list(MODELS)
    assert by_model(first) == {"a": "pass", "b": "fail", "c": "pass", "d": "pass"}
    assert first.verdict is Verdict.FAIL
    again, ran = sweep(tmp_path, {})
    assert (again.cases, ran) == (first.cases, [])


def test_a_sweep_that_was_stopped_goes_on(tmp_path: Path) -> None:
    class Stop(Exception):
        pass

    ran: list[str] = []
    run = scripted({}, ran)

    class Stopping(Console):
        def print(self, *_args: object, **_kwargs: object) -> None:
            if len(ran) >= 2:
                raise Stop

    pool = LocalPool(run, JobResources())
    with pytest.raises(Stop):
        run_sweep(asked(tmp_path), Stopping(file=io.StringIO()), plan_of(jobs_of(*MODELS)), pool)
    kept = [case.case.model for case in summary_in(tmp_path / "sweep").cases]
    _, rest = sweep(tmp_path, {})
    assert sorted(kept + rest) == list(MODELS)
    assert len(kept) >= 1


def test_another_source_runs_again_within_the_same_run(tmp_path: Path) -> None:
    sweep(tmp_path, {"a": "fail"})
    summary, ran = sweep(tmp_path, {}, source="edited")
    assert ran == list(MODELS)
    assert by_model(summary)["a"] == "pass"
    assert not any(case.flaky for case in summary.cases)


def test_other_settings_run_again(tmp_path: Path) -> None:
    sweep(tmp_path, {})
    changed = [*jobs_of("a", settings=Settings(batch_size=2)), *jobs_of("b", "c", "d", settings=Settings(timeout=9.0))]
    assert sweep(tmp_path, {}, jobs=changed)[1] == ["a"]


def test_rerun_failed_runs_those_and_the_last_word_counts(tmp_path: Path) -> None:
    sweep(tmp_path, {"b": "crash", "c": "inconclusive"})
    summary, ran = sweep(tmp_path, {}, rerun=FAILED)
    assert ran == ["b"]
    assert by_model(summary) == {"a": "pass", "b": "pass", "c": "inconclusive", "d": "pass"}
    assert [case.case.model for case in summary.cases if case.flaky] == ["b"]
    assert sweep(tmp_path, {}, rerun=FAILED)[1] == []


def test_a_rerun_that_was_stopped_goes_on_and_repeats_nothing(tmp_path: Path) -> None:
    sweep(tmp_path, dict.fromkeys(MODELS, "fail"))
    stop_a_rerun(tmp_path, dict.fromkeys(MODELS, "fail"), after=1)
    _, ran = sweep(tmp_path, dict.fromkeys(MODELS, "fail"), rerun=FAILED)
    assert ran == ["b", "c", "d"]
    _, ran = sweep(tmp_path, dict.fromkeys(MODELS, "fail"), rerun=statuses_of(["fail"]))
    assert ran == list(MODELS)


def stop_a_rerun(folder: Path, answers: dict[str, Sequence[str] | str], after: int) -> None:
    class StoppingPool(LocalPool[SweepJob]):
        def run(self, jobs: Sequence[SweepJob], begun: Any) -> Any:
            return super().run(jobs[:after], begun)

    pool = StoppingPool(scripted(answers, []), JobResources())
    run_sweep(asked(folder, rerun=FAILED), Console(file=io.StringIO()), plan_of(jobs_of(*MODELS)), pool)


def test_flaky_repeats_find_what_ends_in_two_ways(tmp_path: Path) -> None:
    summary, ran = sweep(tmp_path, {"c": ["pass", "fail", "pass"]}, repeats=3)
    assert ran == list(MODELS) * 3
    assert [case.case.model for case in summary.cases if case.flaky] == ["c"]
    assert by_model(summary)["c"] == "fail"


def test_a_skip_is_recorded_with_its_reason_and_not_run(tmp_path: Path) -> None:
    summary, ran = sweep(tmp_path, {}, jobs=[*jobs_of("a"), *jobs_of("b", settings=Settings(skip="needs a moon"))])
    assert ran == ["a"]
    assert [(case.status.value, case.result.message) for case in summary.cases][1] == ("skipped", "needs a moon")
    summary, ran = sweep(tmp_path, {"b": "fail"}, jobs=jobs_of("a", "b"))
    assert ran == ["b"]
    assert by_model(summary)["b"] == "fail"


def test_the_summary_is_of_what_was_asked_for(tmp_path: Path) -> None:
    sweep(tmp_path, {"b": "fail"})
    summary, _ = sweep(tmp_path, {}, jobs=jobs_of("a"))
    assert by_model(summary) == {"a": "pass"}
    assert summary.verdict is Verdict.PASS


def test_shards_that_are_merged_are_the_whole(tmp_path: Path) -> None:
    jobs = jobs_of(*MODELS)
    parts = []
    for number in range(2):
        folder = tmp_path / str(number)
        sweep(folder, {"b": "fail"}, jobs=jobs[number::2])
        parts.append(folder / "sweep")
    told: list[str] = []
    merge(tmp_path / "sweep", parts, told.append)
    assert told == [f"{part}: 2 results" for part in parts]
    summary, ran = sweep(tmp_path, {})
    assert ran == []
    assert by_model(summary) == {"a": "pass", "b": "fail", "c": "pass", "d": "pass"}


@pytest.mark.parametrize(
    ("visible", "devices", "expected"),
    [
        (None, ("cuda",), ["0", "1"]),
        ("2,GPU-77", ("cuda",), ["2", "GPU-77"]),
        ("3, 4, 5", ("cpu", "cuda"), ["3", "4"]),  # torch found two of them
        ("2,3", ("cpu",), [None, None]),
    ],
)
def test_jobs_have_the_gpus_that_the_user_leaves_visible(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    visible: str | None,
    devices: tuple[str, ...],
    expected: list[str | None],
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    gate = threading.Barrier(2, timeout=30)
    seen: list[str | None] = []

    def run(_job: SweepJob, resources: JobResources, _started: object, warm: object) -> CaseResult:
        gate.wait()  # both run at a time
        assert warm is None
        seen.append(resources.gpu)
        return outcome()

    monkeypatch.setattr(drive, "run_case", run)
    plan = replace(plan_of(jobs_of("a", "b")), devices=2)
    run_sweep(asked(tmp_path, jobs=2, devices=devices), Console(file=io.StringIO()), plan)
    assert sorted(seen, key=str) == expected


@pytest.mark.parametrize(
    ("values", "forks"),
    [
        ({"jobs": 3}, True),
        ({"fresh": True}, False),
        ({"engine": "ray"}, False),  # its jobs start on other machines
        ({"devices": ("cuda",)}, False),
    ],
)
def test_only_cases_on_the_cpu_of_this_machine_are_forked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, values: dict[str, object], forks: bool
) -> None:
    monkeypatch.setattr(drive, "WarmProcess", lambda _modules, _place: contextlib.nullcontext("forks"))
    monkeypatch.setattr(sys, "platform", "linux")
    with warm_process(asked(tmp_path, **values)) as warm:
        assert warm == ("forks" if forks else None)


def test_nothing_of_the_users_is_imported_before_a_fork() -> None:
    assert modules_of(["python:models.py", "dumps:x"]) == modules_of([])
    assert any(name.startswith("transformers.") for name in modules_of(["huggingface"]))


def test_what_merge_and_rerun_refuse(tmp_path: Path) -> None:
    with pytest.raises(SuiteError, match="--merge: name the folders"):
        merge(tmp_path / "a", [], print)
    with pytest.raises(SuiteError, match="is the folder to write to"):
        merge(tmp_path / "a", [tmp_path / "a"], print)
    with pytest.raises(SuiteError, match="--rerun got 'bad'; expected failed, all, pass"):
        statuses_of(["bad"])
    assert statuses_of(["out_of_memory", "hang"]) == ["out of memory", "hang"]
    assert "skipped" not in statuses_of(["all"])


def test_a_state_that_comes_back_counts_and_not_the_one_in_between(tmp_path: Path) -> None:
    sweep(tmp_path, {"a": "error"}, jobs=jobs_of("a"), source="broken")
    assert sweep(tmp_path, {}, jobs=jobs_of("a"), source="mended")[0].verdict is Verdict.PASS
    summary, ran = sweep(tmp_path, {}, jobs=jobs_of("a"), source="broken")
    assert (by_model(summary), ran) == ({"a": "error"}, [])
    assert summary_in(tmp_path / "sweep").verdict is Verdict.FAIL


def test_a_case_that_was_skipped_in_between_shows_its_result_again(tmp_path: Path) -> None:
    sweep(tmp_path, {"a": "error"}, jobs=jobs_of("a"))
    skipped, _ = sweep(tmp_path, {}, jobs=jobs_of("a", settings=Settings(skip="for now")))
    assert by_model(skipped) == {"a": "skipped"}
    summary, ran = sweep(tmp_path, {}, jobs=jobs_of("a"))
    assert (by_model(summary), ran) == ({"a": "error"}, [])


def test_a_rerun_of_another_state_hinders_no_later_one(tmp_path: Path) -> None:
    sweep(tmp_path, dict.fromkeys(MODELS, "fail"))
    stop_a_rerun(tmp_path, {}, after=0)
    sweep(tmp_path, dict.fromkeys(MODELS, "fail"), source="b")
    _, ran = sweep(tmp_path, {}, source="b", rerun=FAILED)
    assert ran == list(MODELS)


def test_a_rerun_also_runs_what_has_no_result(tmp_path: Path) -> None:
    sweep(tmp_path, {"a": "fail"}, jobs=jobs_of("a"))
    _, ran = sweep(tmp_path, {}, jobs=jobs_of("a", "b"), rerun=FAILED)
    assert ran == ["a", "b"]


def test_a_lost_case_runs_again_by_itself(tmp_path: Path) -> None:
    sweep(tmp_path, {"b": "lost"})
    summary, ran = sweep(tmp_path, {})
    assert (by_model(summary)["b"], ran) == ("pass", ["b"])


def test_what_a_part_reran_is_rerun_where_it_is_merged(tmp_path: Path) -> None:
    sweep(tmp_path, {"b": "error"})
    sweep(tmp_path, {}, rerun=FAILED)
    for _ in range(2):
        merge(tmp_path / "all", [tmp_path / "sweep"], lambda _: None)
    assert summary_in(tmp_path / "all").verdict is Verdict.PASS


def test_the_newer_state_counts_whatever_the_order_of_merging(tmp_path: Path) -> None:
    for name, source, answer in (("old", "x", "pass"), ("new", "y", "fail")):
        sweep(tmp_path / name, {"a": answer}, jobs_of("a"), source)
    for order in (("old", "new"), ("new", "old")):
        whole = tmp_path / f"{order[0]} first"
        merge(whole, [tmp_path / name / "sweep" for name in order], lambda _: None)
        assert summary_in(whole).verdict is Verdict.FAIL


def test_a_part_that_is_missing_is_no_pass(tmp_path: Path) -> None:
    jobs = jobs_of("a", "b")
    summary, _ = swept(tmp_path, plan_of(jobs[1:], others=jobs[:1]))
    assert summary.verdict is Verdict.PASS  # of its own part
    merge(tmp_path / "all", [tmp_path / "sweep"], lambda _: None)
    merged = summary_in(tmp_path / "all")
    assert merged.verdict is Verdict.INCONCLUSIVE
    assert [case.model for case in merged.waiting] == ["a"]
    text = render_text(merged)
    assert "1 pass, 1 without a result" in text
    assert "sweep again with the same --out, or merge the other parts" in text
    assert json.loads(render_json(merged))["waiting"][0][1] == "a"
    assert 'errors="1"' in render_junit(merged)
    assert "1 without a result" in render_html(merged)


def test_a_misspelt_model_is_told(tmp_path: Path) -> None:
    with pytest.raises(SuiteError, match=re.escape("--only got 'typo', which no model matches. There are a1, b, ...")):
        asked(tmp_path, only=("a*", "typo")).refuse_unknown(["a1", "b"])
    models = ["AlbertForMaskedLM", "BertForMaskedLM", "T5"]
    for typo, near in (("bert*", "AlbertForMaskedLM, BertForMaskedLM"), ("BertForMaskLM", "BertForMaskedLM, Albert")):
        with pytest.raises(SuiteError, match=f"Near it: {near}"):
            asked(tmp_path, only=(typo,)).refuse_unknown(models)
    asked(tmp_path, only=("a*",)).refuse_unknown(["a1", "b"])
