"""Files of older versions: evidence had phrases, and said to code what members of a finding say now."""

from __future__ import annotations

import json
from typing import Any

import pytest

from checked_backend.errors import CheckedBackendError
from checked_backend.findings import EvidenceKey, Finding
from checked_backend.report import Report


def read(version: int, **members: Any) -> Finding:
    finding = {"kind": "logic", "subject": "output[0]", "message": "wrong", **members}
    text = {"schema": "checked_backend.report", "version": version, "findings": [finding], "coverage": {}}
    (found,) = Report.from_json(json.dumps(text)).findings
    return found


@pytest.mark.parametrize("version", [1, 2])
def test_phrases_become_identifiers_and_what_is_unknown_stays(version: int) -> None:
    old = {key.phrase: key.value for key in EvidenceKey} | {"my own": 1}
    found = read(version, evidence={**old, "explains": ["output[1]"], "$float": 2})
    assert set(found.evidence) == {*EvidenceKey, "my own", "$float"}
    assert all(found.evidence[key] == key for key in EvidenceKey if key is not EvidenceKey.EXPLAINS)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(
    ("members", "expected"),
    [
        ({}, {"searched": False, "repro_confirmed": True, "workaround_confirmed": True, "explains": ()}),
        ({"evidence": {"likely at fault": "its fake kernel"}}, {"at_fault": "its fake kernel"}),
        ({"evidence": {"likely at fault": 7}}, {"at_fault": ""}),
        ({"evidence": {"explains": ["output[1]", 3]}}, {"explains": ("output[1]",)}),
        ({"evidence": {"repro": "none: full"}, "repro": "x.py"}, {"repro_confirmed": False, "repro": "x.py"}),
        ({"evidence": {"workaround": "not tried"}}, {"workaround_confirmed": False}),
        ({"evidence": {"rank": "1 of 2"}}, {"ranks": ("1 of 2",)}),
        ({"evidence": {"how it was localized": "bisected"}}, {"searched": True}),
        ({"evidence": {"localized": "no"}}, {"searched": True}),
        ({"stage": "aot"}, {"searched": True}),
        ({"stage": "aot", "evidence": {"level": "AOT autograd"}}, {"searched": False}),
        ({"evidence": {"depended on": "node[y] views it"}}, {"more_than_layout": "node[y] views it"}),
        ({"evidence": {"gradients are lost": True}}, {"more_than_layout": "gradients are lost"}),
    ],
)
def test_what_the_evidence_said_to_code_is_a_member(
    version: int, members: dict[str, Any], expected: dict[str, Any]
) -> None:
    found = read(version, **members)
    assert {name: getattr(found, name) for name in expected} == expected


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("wrong", [[], "x", None, 3])
def test_what_is_no_evidence_is_refused_in_plain_words(version: int, wrong: object) -> None:
    with pytest.raises(CheckedBackendError, match=r"findings\[0\]\.evidence: expected an object"):
        read(version, evidence=wrong)


def test_a_finding_that_has_the_members_is_not_read_as_an_old_one() -> None:
    assert read(2, searched=False, evidence={"eager repeats itself": 1}).evidence == {"eager repeats itself": 1}
    assert not read(2, searched=False, stage="aot").searched


@pytest.mark.parametrize("members", [{}, {"searched": False}])
@pytest.mark.parametrize("version", [1, 2])
def test_evidence_with_an_earlier_name_is_read_by_its_present_one(version: int, members: dict[str, Any]) -> None:
    assert read(version, evidence={"judged": "by itself", "mine": 1}, **members).evidence == {
        EvidenceKey.CHECKED: "by itself",
        "mine": 1,
    }
