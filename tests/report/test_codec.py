"""JSON to a report and back, its schema, and what is not read."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checked_backend import CheckedBackendError, Report
from checked_backend.findings import Coverage, EvidenceKey, Finding, Kind, Metrics, Severity
from checked_backend.findings.pictures import MOST_CODE
from checked_backend.report.codec import json_schema
from tests.support.cli_tools import runner

jsonschema: Any = pytest.importorskip("jsonschema")
SCHEMA = json_schema()
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)

HOSTILE = ["<script>alert(1)</script>", "\x1b[31mred", "a\u202eb", "\ud800", "{{ 7 * 7 }}", "../../etc/passwd", "\x00"]
OURS = ["$float", "$complex", "re", "$$x"]

texts = st.text(max_size=20) | st.sampled_from(HOSTILE)
evidence = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.complex_numbers() | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts | st.sampled_from(OURS), inner, max_size=3),
    max_leaves=6,
)
SIMPLE: Mapping[Any, st.SearchStrategy[Any]] = {
    str: texts,
    int: st.integers(0, 2**63),
    bool: st.booleans(),
    float: st.floats(),
    complex: st.complex_numbers(),
    Any: evidence,
    Kind: st.sampled_from(Kind),
    Severity: st.sampled_from(Severity),
    type(None): st.none(),
    Path: st.none(),
}


def any_of(kind: Any) -> st.SearchStrategy[Any]:
    """Any value of a type, as the fields of a report have it."""
    if kind in SIMPLE:
        return SIMPLE[kind]
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        return st.builds(kind, **{entry.name: any_of(hints[entry.name]) for entry in fields(kind)})
    kinds = [any_of(one) for one in get_args(kind) if one is not ...]
    if get_origin(kind) is tuple:
        return st.lists(kinds[0], max_size=2).map(tuple) if ... in get_args(kind) else st.tuples(*kinds)
    return st.dictionaries(*kinds, max_size=2) if get_origin(kind) is Mapping else st.one_of(kinds)


reports = any_of(Report)
LOGIC = Finding(Kind.LOGIC, "output[0]", "message")
CHECKED = Coverage(checked={"outputs": 1})


@settings(deadline=None)  # a test is not timed
@given(reports)
def test_json_round_trip(report: Report) -> None:
    text = report.to_json()
    VALIDATOR.validate(json.loads(text, parse_constant=pytest.fail))
    again = Report.from_json(text)
    assert repr(again) == repr(report)  # repr, because NaN is not equal to itself; it tells -0.0 from 0.0 too
    assert again.to_json() == text
    assert again.verdict is report.verdict


def test_json_holds_what_json_has_no_word_for() -> None:
    class Broken:
        def __str__(self) -> str:
            raise RuntimeError

    deep: list[object] = []
    deep.append(deep)
    held = {"path": Path("x"), "kind": Kind.RNG, "set": {2, 1}, "tuple": (1, 2), "broken": Broken(), "deep": deep}
    held["huge"] = 10**5000
    report = Report((Finding(Kind.RNG, "s", "m", evidence=held),), CHECKED)
    got = Report.from_json(report.to_json()).findings[0].evidence
    assert (got["path"], got["kind"], got["set"], got["tuple"]) == ("x", "rng", ["1", "2"], [1, 2])
    assert got["broken"] == "<Broken>"
    assert got["huge"].startswith("0x")


def test_json_writes_nonfinite_and_complex_numbers() -> None:
    zeros = dict.fromkeys((entry.name for entry in fields(Metrics)), 0)
    odd = Metrics(**{**zeros, "max_abs_diff": math.inf, "rmse": math.nan, "index": (), "candidate_value": 1 - 2j})
    got = json.loads(Report((Finding(Kind.LOGIC, "s", "m", metrics=odd),), CHECKED).to_json())["findings"][0]["metrics"]
    assert (got["max_abs_diff"], got["rmse"], got["candidate_value"]) == ("inf", "nan", {"re": 1.0, "im": -2.0})


def edited(place: str, value: object) -> dict[str, Any]:
    raw: dict[str, Any] = json.loads(Report((LOGIC,), CHECKED, "title").to_json())
    *parents, last = (int(part) if part.isdigit() else part for part in place.split("."))
    part: Any = raw
    for parent in parents:
        part = part[parent]
    part[last] = value
    return raw


SPREAD = {"shape": [1], "matrix": [1, 1], "blocks": []}
NODE = {"name": "a", "op": "b", "inputs": [], "error": 1.0}
KERNEL = {"name": "k", "language": "C++", "code": "x"}


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        ("schema", "other", "schema: expected 'checked_backend.report', got 'other'"),
        ("version", 1, "version: expected 2, got 1"),
        ("version", True, "version: expected 2, got True"),
        ("title", 3, "title: expected a valid string, got 3"),
        ("surprise", 1, "surprise: there is no such member, got 1"),
        ("coverage", None, "coverage: expected an object, got None"),
        ("coverage.checked", {"outputs": -1}, "coverage.checked.outputs: expected greater than or equal to 0, got -1"),
        ("coverage.detection_limit", {"x": "much"}, "coverage.detection_limit.x: "),
        ("coverage.detection_limit", {"x": "infinity"}, "coverage.detection_limit.x: "),
        ("coverage.regions", [{"name": "f", "calls": 2**65}], "coverage.regions[0].calls: "),
        (
            "coverage.skipped",
            [{"subject": "x", "reason": "y", "matters": 1}],
            "coverage.skipped[0].matters: expected a valid boolean, got 1",
        ),
        ("findings", {}, "findings: expected a list, got {}"),
        ("findings", [{"kind": "logic", "message": ""}], "findings[0].subject: it is missing"),
        ("findings.0.kind", "no kind", "findings[0].kind: expected 'structure', 'alias'"),
        ("findings.0.kind", ["logic"], "findings[0].kind: expected 'structure', 'alias'"),
        ("findings.0.surprise", 1, "findings[0].surprise: there is no such member, got 1"),
        ("findings.0.evidence", [], "findings[0].evidence: expected an object, got []"),
        ("findings.0.metrics", {}, "findings[0].metrics.total: it is missing"),
        ("findings.0.distribution", {**SPREAD, "blocks": [[1.0] * 65]}, "findings[0].distribution.blocks[0]: "),
        ("findings.0.distribution", {**SPREAD, "blocks": [[1.0]] * 65}, "findings[0].distribution.blocks: "),
        ("findings.0.distribution", {**SPREAD, "blocks": [["<b>"]]}, "findings[0].distribution.blocks[0][0]: "),
        ("findings.0.distribution", {**SPREAD, "matrix": [1]}, "findings[0].distribution.matrix[1]: "),
        ("findings.0.distribution", {**SPREAD, "matrix": [1, -1]}, "findings[0].distribution.matrix[1]: "),
        ("findings.0.distribution", {**SPREAD, "shape": ["1"]}, "findings[0].distribution.shape[0]: "),
        ("findings.0.distribution", {**SPREAD, "ulps": [10**30]}, "findings[0].distribution.ulps[0]: "),
        (
            "findings.0.distribution",
            {**SPREAD, "worst": [{"index": [0], "expected": "1", "actual": 1}]},
            "findings[0].distribution.worst[0].expected: expected a number",
        ),
        ("findings.0.distribution", {**SPREAD, "worst": [{}] * 65}, "findings[0].distribution.worst"),
        ("findings.0.flow", {}, "findings[0].flow: expected a list, got {}"),
        ("findings.0.flow", [NODE] * 401, "findings[0].flow: "),
        ("findings.0.flow", [{**NODE, "inputs": ["x"] * 401}], "findings[0].flow[0].inputs: "),
        ("findings.0.flow", [{**NODE, "inputs": "x"}], "findings[0].flow[0].inputs: expected a list, got 'x'"),
        ("findings.0.flow", [{**NODE, "name": 1}], "findings[0].flow[0].name: "),
        ("findings.0.flow", [{**NODE, "error": None}], "findings[0].flow[0].error: "),
        ("findings.0.kernel", [], "findings[0].kernel: expected an object, got []"),
        ("findings.0.kernel", {"name": "k", "language": "C++"}, "findings[0].kernel.code: it is missing"),
        ("findings.0.kernel", {**KERNEL, "code": "x" * (MOST_CODE + 1)}, "findings[0].kernel.code: "),
        ("findings.0.kernel", {**KERNEL, "lines_left_out": -1}, "findings[0].kernel.lines_left_out: "),
        ("findings.0.kernel", {**KERNEL, "computes": ["a"] * 401}, "findings[0].kernel.computes: "),
    ],
)
def test_what_the_schema_forbids_is_refused_with_its_place(place: str, value: object, said: str) -> None:
    raw = edited(place, value)
    assert not VALIDATOR.is_valid(raw)
    with pytest.raises(CheckedBackendError) as caught:
        Report.from_json(json.dumps(raw))
    assert str(caught.value).startswith(f"not a report: report.{said}")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "not JSON: Expecting value: line 1 column 1 (char 0)"),
        ("[]", "report: expected an object, got []"),
        ("{}", "report.schema: it is missing"),
        ("[" * 100_000, "not JSON: "),
        ("9" * 5000, "not JSON: "),
        (dict.fromkeys(map(str, range(2**17 + 1))), "an object has 131073 members"),
        ('{"x": NaN}', "not JSON: the constant NaN is not JSON; a report writes it as a string"),
        (edited("coverage.detection_limit", {"x": 10**400}), "report.coverage.detection_limit.x: "),
        (edited("findings.0.evidence", {"a": {"$float": "evil"}}), "report.findings[0].evidence.a: "),
        (edited("findings.0.evidence", {"a": json.loads("[" * 60 + "]" * 60)}), "report.findings[0].evidence.a: "),
        (
            edited("verdict", "pass"),
            "report.verdict: expected 'fail', which follows from its findings and coverage, got 'pass'",
        ),
    ],
)
def test_from_json_says_what_is_wrong(text: Any, said: str) -> None:
    with pytest.raises(CheckedBackendError) as caught:
        Report.from_json(text if isinstance(text, str) else json.dumps(text))
    assert str(caught.value).startswith(f"not a report: {said}")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@settings(deadline=None)  # a test is not timed
@given(st.data(), json_values)
def test_from_json_never_fails_in_another_way(data: st.DataObject, value: object) -> None:
    raw = json.loads(Report((LOGIC,), CHECKED, "title").to_json())
    place, key = raw, data.draw(st.sampled_from(sorted(raw)))
    while isinstance(place[key], dict | list) and place[key] and data.draw(st.booleans()):
        place = place[key]
        key = data.draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
    place[key] = value
    with suppress(CheckedBackendError):
        Report.from_json(json.dumps(raw))


def test_the_schema_has_every_piece_of_evidence_with_its_phrase() -> None:
    told = SCHEMA["$defs"]["Finding"]["properties"]["evidence"]["properties"]
    assert {key: entry["description"] for key, entry in told.items()} == {key.value: key.phrase for key in EvidenceKey}


def test_the_command_prints_the_schema_and_reads_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = runner(capsys)("report", "--schema")
    assert (code, err) == (0, "")
    assert json.loads(out) == SCHEMA
    VALIDATOR.check_schema(SCHEMA)
