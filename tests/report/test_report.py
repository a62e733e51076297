"""The verdict, and JSON to a report and back."""

from __future__ import annotations

import json
import math
from contextlib import suppress
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checked_backend.errors import CheckedBackendError, DivergenceError
from checked_backend.findings import (
    Coverage,
    Distribution,
    Finding,
    Kernel,
    Kind,
    Metrics,
    NodeError,
    NoiseScale,
    RegionInfo,
    Skip,
    Verdict,
    WorstElement,
)
from checked_backend.report import Report

HOSTILE = ["<script>alert(1)</script>", "\x1b[31mred", "a\u202eb", "\ud800", "{{ 7 * 7 }}", "../../etc/passwd", "\x00"]

texts = st.text(max_size=20) | st.sampled_from(HOSTILE)
floats = st.floats()
counts = st.integers(0, 2**63)
numbers = floats | st.integers(-(2**63), 2**63) | st.booleans() | st.complex_numbers() | st.none()
evidence = st.dictionaries(
    texts | st.sampled_from(["$float", "$complex", "re", "$$x"]),
    st.recursive(
        st.none() | st.booleans() | st.integers() | floats | st.complex_numbers() | texts,
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(texts | st.sampled_from(["$float", "$complex", "re", "$$x"]), inner, max_size=3)
        ),
        max_leaves=6,
    ),
    max_size=3,
)
metrics = st.builds(
    Metrics,
    total=counts,
    mismatched=counts,
    max_abs_diff=floats,
    max_rel_diff=floats,
    max_ulp=st.none() | counts,
    rmse=floats,
    reference_rms=floats,
    reference_max=floats,
    nonfinite_mismatched=counts,
    nan_reference=counts,
    nan_candidate=counts,
    inf_reference=counts,
    inf_candidate=counts,
    index=st.none() | st.lists(counts, max_size=4).map(tuple),
    reference_value=numbers,
    candidate_value=numbers,
)
noises = st.builds(NoiseScale, rms=floats, max=floats, source=texts, detection_limit=st.none() | floats)
maybe = st.none() | texts
distributions = st.builds(
    Distribution,
    shape=st.lists(counts, max_size=3).map(tuple),
    matrix=st.tuples(counts, counts),
    blocks=st.lists(st.lists(floats, max_size=3).map(tuple), max_size=3).map(tuple),
    ulps=st.lists(counts, max_size=4).map(tuple),
    worst=st.lists(
        st.builds(
            WorstElement,
            index=st.lists(counts, max_size=3).map(tuple),
            expected=numbers.filter(lambda number: number is not None),
            actual=numbers.filter(lambda number: number is not None),
            float64=numbers,
        ),
        max_size=2,
    ).map(tuple),
)
flows = st.lists(
    st.builds(
        NodeError,
        name=texts,
        op=texts,
        inputs=st.lists(texts, max_size=2).map(tuple),
        error=floats,
        own=st.none() | floats,
        noise=st.none() | floats,
        source=texts,
    ),
    max_size=4,
).map(tuple)
findings = st.builds(
    Finding,
    kind=st.sampled_from(Kind),
    subject=texts,
    message=texts,
    detail=texts,
    region=texts,
    expected=maybe,
    actual=maybe,
    metrics=st.none() | metrics,
    noise=st.none() | noises,
    evidence=evidence,
    graph=maybe,
    stage=maybe,
    node=maybe,
    op=maybe,
    source=maybe,
    workaround=maybe,
    repro=maybe,
    at_fault=texts,
    explains=st.lists(texts, max_size=2).map(tuple),
    ranks=st.lists(texts, max_size=2).map(tuple),
    searched=st.booleans(),
    repro_confirmed=st.booleans(),
    workaround_confirmed=st.booleans(),
    distribution=st.none() | distributions,
    flow=flows,
    kernel=st.none()
    | st.builds(
        Kernel,
        name=texts,
        language=texts,
        code=texts,
        lines_left_out=counts,
        computes=st.lists(texts, max_size=2).map(tuple),
        others=st.lists(texts, max_size=2).map(tuple),
    ),
)
coverages = st.builds(
    Coverage,
    regions=st.lists(
        st.builds(RegionInfo, name=texts, sources=st.lists(texts, max_size=2).map(tuple), nodes=counts), max_size=2
    ).map(tuple),
    checked=st.dictionaries(texts, counts, max_size=3),
    skipped=st.lists(st.builds(Skip, texts, texts, st.booleans(), texts), max_size=3).map(tuple),
    ignored=st.lists(findings, max_size=1).map(tuple),
    notes=st.lists(texts, max_size=2).map(tuple),
    detection_limit=st.dictionaries(texts, floats, max_size=2),
    own_precision_limit=st.dictionaries(texts, floats, max_size=2),
)
reports = st.builds(
    Report,
    findings=st.lists(findings, max_size=3).map(tuple),
    coverage=coverages,
    title=texts,
    environment=st.dictionaries(texts, texts, max_size=2),
)


def finding(kind: Kind) -> Finding:
    return Finding(kind, "output[0]", "message")


CHECKED = Coverage(checked={"outputs": 1})


@settings(deadline=None)  # a test is not timed
@given(reports)
def test_json_round_trip(report: Report) -> None:
    text = report.to_json()
    json.loads(text, parse_constant=pytest.fail)
    again = Report.from_json(text)
    assert repr(again) == repr(report)  # repr, because NaN is not equal to itself; it tells -0.0 from 0.0 too
    assert again.to_json() == text
    assert again.verdict is report.verdict


@settings(deadline=None)  # a test is not timed
@given(reports)
def test_every_rendering_works_and_is_safe(report: Report) -> None:
    text = str(report)
    assert text.startswith(report.verdict.value.upper() + ": ")
    page = report.to_html()
    page.encode("utf-8")
    for output in (text, page):
        assert not set(output) & {"\x1b", "\x00", "\u202e"}
    assert "<script" not in page


@pytest.mark.parametrize("kind", list(Kind))
def test_verdict_of_a_kind(kind: Kind) -> None:
    expected = Verdict.FAIL if kind.fails else Verdict.INCONCLUSIVE
    assert Report((finding(kind),), CHECKED).verdict is expected


@pytest.mark.parametrize(
    ("coverage", "expected"),
    [
        (CHECKED, Verdict.PASS),
        (Coverage(), Verdict.INCONCLUSIVE),
        (Coverage(checked={"outputs": 0, "gradients": 0}), Verdict.INCONCLUSIVE),
        (Coverage(checked={"outputs": 1}, skipped=(Skip("x", "y"),)), Verdict.PASS),
        (Coverage(checked={"outputs": 1}, skipped=(Skip("x", "y", matters=True),)), Verdict.INCONCLUSIVE),
        (Coverage(checked={"outputs": 1}, ignored=(finding(Kind.LOGIC),)), Verdict.PASS),
    ],
)
def test_verdict_of_a_coverage(coverage: Coverage, expected: Verdict) -> None:
    assert Report((), coverage).verdict is expected


def test_fail_wins_over_inconclusive() -> None:
    assert Report((finding(Kind.UNSUPPORTED), finding(Kind.RNG)), Coverage()).verdict is Verdict.FAIL


def test_raise_for_verdict() -> None:
    failed = Report((finding(Kind.LOGIC),), CHECKED)
    with pytest.raises(DivergenceError) as caught:
        failed.raise_for_verdict()
    assert caught.value.report is failed
    assert str(caught.value) == str(failed)
    Report((), Coverage()).raise_for_verdict()
    Report((), CHECKED).raise_for_verdict()


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
    written = json.loads(Report((Finding(Kind.LOGIC, "s", "m", metrics=odd),), CHECKED).to_json())
    got = written["findings"][0]["metrics"]
    assert (got["max_abs_diff"], got["rmse"], got["candidate_value"]) == ("inf", "nan", {"re": 1.0, "im": -2.0})


def edited(**changes: object) -> str:
    raw = json.loads(Report((finding(Kind.LOGIC),), CHECKED, "title").to_json())
    for path, value in changes.items():
        *parents, last = path.split("__")
        place = raw
        for parent in parents:
            place = place[int(parent) if parent.isdigit() else parent]
        place[last] = value
    return json.dumps(raw)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not a report: not JSON: Expecting value: line 1 column 1 (char 0)"),
        ("[]", "not a report: report: expected an object, got []"),
        ("{}", "not a report: report.schema: it is missing"),
        ("[" * 100_000, None),
        ("9" * 5000, None),
        (
            '{"x": NaN}',
            "not a report: not JSON: the constant NaN is not JSON; a report writes it as a string",
        ),
        (edited(version=3), "not a report: report.version: expected 2, got 3"),
        (edited(version=1), None),
        (edited(version=True), None),
        (edited(title=3), "not a report: report.title: expected a valid string, got 3"),
        (edited(surprise=1), "not a report: report.surprise: there is no such member, got 1"),
        (edited(findings={}), "not a report: report.findings: expected a list, got {}"),
        (edited(findings__0__kind="bad"), None),
        (edited(findings__0__kind=["logic"]), None),
        (edited(findings__0__evidence=[]), "not a report: report.findings[0].evidence: expected an object, got []"),
        (edited(findings__0__evidence={"a": {"$float": "evil"}}), None),
        (edited(findings__0__metrics={}), "not a report: report.findings[0].metrics.total: it is missing"),
        (
            edited(coverage__checked={"outputs": -1}),
            "not a report: report.coverage.checked.outputs: expected greater than or equal to 0, got -1",
        ),
        (edited(coverage__detection_limit={"x": 10**400}), None),
        (edited(coverage__detection_limit={"x": "infinity"}), None),
        (
            edited(coverage__skipped=[{"subject": "x", "reason": "y", "matters": 1}]),
            "not a report: report.coverage.skipped[0].matters: expected a valid boolean, got 1",
        ),
        (
            edited(verdict="pass"),
            "not a report: report.verdict: expected 'fail', which follows from its findings and coverage, got 'pass'",
        ),
    ],
)
def test_from_json_says_what_is_wrong(text: str, message: str | None) -> None:
    with pytest.raises(CheckedBackendError) as caught:
        Report.from_json(text)
    if message is not None:
        assert str(caught.value) == message


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@settings(deadline=None)  # a test is not timed
@given(st.data(), json_values)
def test_from_json_never_fails_in_another_way(data: st.DataObject, value: object) -> None:
    raw = json.loads(Report((finding(Kind.LOGIC),), CHECKED, "title").to_json())
    place, key = raw, data.draw(st.sampled_from(sorted(raw)))
    while isinstance(place[key], dict | list) and place[key] and data.draw(st.booleans()):
        place = place[key]
        key = data.draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
    place[key] = value
    with suppress(CheckedBackendError):
        Report.from_json(json.dumps(raw))
