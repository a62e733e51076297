"""The ledger says which answers have changed, and nothing where none has."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import checked_backend as cb
from tests.ledger import __main__ as ledger
from tests.ledger.answer import Answers, Case, differences, line_of, of_report, one, read, write
from tests.ledger.pool import run_cases
from tests.ledger.sources import all_cases
from tests.support import faults

PASS = {"verdict": "pass", "findings": []}
WRONG = {"verdict": "fail", "findings": [["logic", "logic", "output[0]"]]}
NAMED = {**WRONG, "where": [["aten.sin.default", "compiled", "in forward: x.sin()"]]}


@pytest.mark.parametrize(
    ("before", "now", "lines"),
    [
        ({"a": PASS, "b": WRONG}, {"a": PASS, "b": WRONG}, []),
        ({"a": PASS}, {"a": WRONG}, ["a: verdict pass -> fail; findings +(logic, logic, output[0])"]),
        ({"a": NAMED}, {"a": {**NAMED, "where": []}}, ["a: where -(aten.sin.default, compiled, in forward: x.sin())"]),
        ({"a": NAMED}, {"a": WRONG}, ["a: where [['aten.sin.default', 'compiled', 'in forward: x.sin()']] -> None"]),
        ({"a": WRONG}, {}, ["a: no answer any more; it was fail (logic, logic, output[0])"]),
        ({}, {"a": PASS}, ["a: new: pass"]),
        ({"a": {**PASS, "processor": "AVX2"}}, {"a": {**WRONG, "processor": "AVX512"}}, []),
    ],
)
def test_each_changed_answer_is_a_line(before: Answers, now: Answers, lines: list[str]) -> None:
    assert [*differences(before, now)] == lines


def test_answers_are_a_line_each_and_read_as_written(tmp_path: Path) -> None:
    path = tmp_path / "answers.json"
    write(path, {"b": NAMED, "a": PASS})
    assert [line[:3] for line in path.read_text().splitlines()] == ["{", '"a"', '"b"', "}"]
    assert read(path) == {"a": PASS, "b": NAMED}


def test_an_answer_has_findings_but_no_texts_and_no_line_numbers() -> None:
    answer = of_report(cb.check(torch.sin, (torch.ones(2),), compiler=faults.wrong_value()), localized=True)
    assert (answer["verdict"], answer["findings"]) == ("fail", [["logic", "logic", "output[0]"]])
    assert line_of("src/model.py:41 in forward: x = torch.relu(x)") == "forward: x = torch.relu(x)"


def test_names_of_cases_are_unique_and_every_source_has_quick_ones() -> None:
    cases = [*all_cases(None)]
    assert len({case.name for case in cases}) == len(cases) > 900
    sources = {case.name.partition("/")[0] for case in cases}
    assert sources - {case.name.partition("/")[0] for case in cases if case.quick} == {"selftest", "ranks", "localized"}


def _dies() -> Answers:
    os.abort()


def _hangs() -> Answers:
    time.sleep(60)
    return one(PASS)


def _raises() -> Answers:
    raise LookupError("planted")


@pytest.mark.process
@pytest.mark.smoke
def test_a_case_that_dies_hangs_or_raises_is_an_answer_and_costs_no_other() -> None:
    asked: dict[str, Callable[[], Answers]] = {
        "dies": _dies,
        "hangs": _hangs,
        "raises": _raises,
        "good": lambda: one(PASS),
    }
    cases = [Case(name, run, seconds=3) for name, run in asked.items()]
    answers = {name: answer["verdict"] for done in run_cases(cases, 2) for name, answer in done.answers.items()}
    assert answers == {"dies": "dies (-6)", "hangs": "hangs", "raises": "raises LookupError", "good": "pass"}


@pytest.mark.process
def test_a_changed_answer_ends_with_1_and_is_accepted_on_purpose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ledger, "TORCH", ".".join(torch.__version__.split(".")[:2]))
    words = ["--answers", str(tmp_path / "answers.json"), "--results", str(tmp_path / "results.jsonl")]
    monkeypatch.setattr(ledger, "all_cases", lambda _: [Case("one", lambda: one(PASS)), Case("two", lambda: one(PASS))])
    assert ledger.main([*words, "--accept"]) == 0
    assert ledger.main(words) == 0
    assert "2 answers compared, 0 changed" in capsys.readouterr().out
    monkeypatch.setattr(ledger, "all_cases", lambda _: [Case("one", lambda: one(WRONG))])
    assert ledger.main([*words, "--only", "one"]) == 1
    told = capsys.readouterr().out
    assert "1 answers compared, 1 changed" in told, "the results of this tree are gone on with"
    assert "two: no such case any more" in told
    assert ledger.main(words[:2]) == 1
    told = capsys.readouterr().out
    assert "one: verdict pass -> fail" in told
    assert "two: no answer any more; it was pass" in told
    assert ledger.main([*words[:2], "--only", "one", "--accept"]) == 0
    accepted = {name: answer["verdict"] for name, answer in read(tmp_path / "answers.json").items()}
    assert accepted == {"one": "fail", "two": "pass"}
    assert ledger.main([*words, "--only", "one", "none"]) == 3
    assert ledger.main([*words, "--cases", str(tmp_path)]) == 3


def test_results_that_were_cut_off_or_are_of_another_tree_are_run_again(tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    results.write_text(json.dumps({"tree": "another", "case": "one", "answers": {"one": WRONG}}) + '\n{"tree": "cut')
    assert ledger.kept_results(results, "this") == {}
    assert ledger.kept_results(tmp_path / "none", "this") == {}
    assert ledger.kept_results(results, "another") == {"one": {"one": WRONG}}
