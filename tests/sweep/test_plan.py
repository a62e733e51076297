"""Which cases a sweep has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from checked_backend.errors import SuiteError
from checked_backend.process.job import JobEnd, JobResources
from checked_backend.sweep import plan
from checked_backend.sweep.plan import Listed, Sweep, SweepJob, list_suite, parse_modes, planned, spec_of
from checked_backend.sweep.rules import Settings, load_rules


def model(name: str, **more: bool) -> dict[str, Any]:
    return {"name": name, "canary": False, "fixed": False, **more}


LISTED = Listed("python:/m.py", "python:m.py", [model("a1"), model("a2"), model("b[0]")], "", {}, 0)


def asked(**values: Any) -> Sweep:
    return Sweep((), Path(), **values)


def names(jobs: Sequence[SweepJob]) -> list[str]:
    return [job.case.model for job in jobs]


def test_models_times_ways() -> None:
    request = asked(
        ways=parse_modes(["inference", "training:float32,amp"], ["bfloat16"]),
        devices=("cpu", "cuda"),
        compilers=("eager", "inductor"),
        dynamic=True,
    )
    jobs = planned(LISTED, request)
    assert len(jobs) == 3 * 3 * 2 * 2
    assert len({job.case.key for job in jobs}) == len(jobs)
    assert all(job.case.dynamic for job in jobs)
    assert {(job.case.mode, job.case.dtype) for job in jobs} == {
        ("inference", "bfloat16"),
        ("training", "float32"),
        ("training", "amp"),
    }


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        ({}, ["a1", "a2", "b[0]"]),
        ({"only": ["a*"]}, ["a1", "a2"]),
        ({"only": ["b[0]", "a1"]}, ["a1", "b[0]"]),
        ({"exclude": ["*2", "b*"]}, ["a1"]),
        ({"shard": (1, 2)}, ["a1", "b[0]"]),
        ({"shard": (2, 2)}, ["a2"]),
        ({"shard": (4, 4)}, []),
    ],
)
def test_selections(values: dict[str, Any], wanted: list[str]) -> None:
    selection = asked(**values)
    assert names(selection.split(planned(LISTED, selection))[0]) == wanted


def test_shards_are_all_and_share_nothing() -> None:
    jobs = planned(LISTED, asked(ways=parse_modes(["inference", "training"], ["float32"])))
    parts = [asked(shard=(number, 4)).split(jobs)[0] for number in (1, 2, 3, 4)]
    keys = [job.case.key for part in parts for job in part]
    assert len(keys) == len(set(keys)) == 6


def test_a_selection_that_leaves_nothing_is_an_error_that_says_what_there_is() -> None:
    with pytest.raises(SuiteError, match=r"none of its 3 models is wanted; it has a1, a2"):
        planned(LISTED, asked(only=["resnet"]))


def test_tags_that_are_not_wanted_and_canaries_are_skipped_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text("version: 1\nrules: [{models: a1, slow: true, reason: an hour}]")
    rules = load_rules([tmp_path / "r.yaml"])
    listed = replace(LISTED, models=[model("a1"), model("c", canary=True)])
    jobs = planned(listed, asked(rules=rules, skip_tags=["slow"]))
    assert [job.settings.skip for job in jobs] == ["slow: an hour", "a canary model; --canary runs it"]
    assert [job.settings.skip for job in planned(listed, asked(rules=rules, canary=True))] == [None, None]


def test_a_dump_has_no_mode_to_choose() -> None:
    listed = replace(LISTED, models=[model("d", fixed=True)])
    (job,) = planned(listed, asked(ways=parse_modes(["inference", "training:amp"], ["float32"]), dynamic=True))
    assert (job.case.mode, job.case.dtype, job.case.dynamic) == ("as dumped", "as dumped", False)


def test_settings_of_the_command_line_hold_where_no_rule_says_otherwise(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text("version: 1\nrules: [{models: a1, batch_size: 9, reason: x}]")
    rules = load_rules([tmp_path / "r.yaml"])
    jobs = planned(LISTED, asked(settings=Settings(batch_size=2, timeout=5.0), rules=rules))
    assert [job.settings.batch_size for job in jobs] == [9, 2, 2]
    assert {job.settings.timeout for job in jobs} == {5.0}


def test_what_changes_the_result_changes_the_state_of_a_case(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"

    def state(settings: Settings = Settings(), **listed: str) -> str:  # noqa: B008
        request = asked(compilers=(f"{path}:mine",), settings=settings, only=["a1"])
        return planned(replace(LISTED, **listed), request)[0].state

    path.write_text("def mine(gm, _): return gm.forward")
    base = state()
    same = (Settings(timeout=1.0), Settings(tags={"slow": "x"}), Settings(localize=True))
    assert {state(settings) for settings in same} == {base}
    others = (
        Settings(batch_size=2),
        Settings(run_as="amp"),
        Settings(ignore_outputs={"o": "x"}),
        Settings(known_fails={"logic": "x"}),
        Settings(noise={"o": (0.1, "x")}),
        Settings(compiler_options={"a": 1}),
        Settings(optimizer="Adam"),
    )
    changed = [state(fingerprint="edited"), *map(state, others)]
    path.write_text("def mine(gm, _): return lambda *a: gm(*a) * 2")
    assert len({base, state(), *changed}) == 10


@pytest.mark.parametrize(
    ("words", "why"),
    [(["train"], "--mode got 'train'; expected inference or training"), (["inference:int8"], "dtype got 'int8'")],
)
def test_modes_and_dtypes_that_there_are_not(words: list[str], why: str) -> None:
    with pytest.raises(SuiteError) as caught:
        parse_modes(words, ["float32"])
    assert why in str(caught.value)


def test_specs_are_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "m.py").touch()
    monkeypatch.chdir(tmp_path)
    assert spec_of("python:m.py") == (f"python:{tmp_path / 'm.py'}", "python:m.py")
    assert spec_of("torchbench:.") == (f"torchbench:{tmp_path}", "torchbench")
    assert spec_of("huggingface") == ("huggingface", "huggingface")
    for text, why in (
        ("models.py", "expected huggingface, timm, python:FILE.py, dumps:DIR or torchbench:DIR"),
        ("huggingface:x", "expected huggingface"),
        ("python:", "expected huggingface"),
        ("python:none.py", "is no Python file"),
        ("dumps:m.py", "is no folder"),
    ):
        with pytest.raises(SuiteError) as caught:
            spec_of(text)
        assert why in str(caught.value)


@pytest.mark.parametrize(
    ("end", "why"),
    [
        (
            JobEnd("", "x", -11, "noise\nlast words\n"),
            "its models cannot be listed: the process was killed by SIGSEGV: last words",
        ),
        (JobEnd('{"error": "timm: unsupported here: x"}', "x", 0), "timm: unsupported"),
    ],
)
def test_a_suite_that_cannot_be_listed(monkeypatch: pytest.MonkeyPatch, end: JobEnd, why: str) -> None:
    monkeypatch.setattr(plan, "run", lambda *_: end)
    with pytest.raises(SuiteError) as caught:
        list_suite("timm", ["eager"], JobResources())
    assert why in str(caught.value)
