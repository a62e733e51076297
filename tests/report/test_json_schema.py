"""The JSON schema: every report that is written keeps it, and what it forbids is not read either."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings

from checked_backend.errors import CheckedBackendError
from checked_backend.findings import EvidenceKey
from checked_backend.report import Report
from checked_backend.report.codec import json_schema
from tests.report.test_report import CHECKED, reports
from tests.support.cli_tools import runner

jsonschema: Any = pytest.importorskip("jsonschema")
SCHEMA = json_schema()
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)


@settings(deadline=None)
@given(reports)
def test_every_report_keeps_it(report: Report) -> None:
    VALIDATOR.validate(json.loads(report.to_json()))


def test_it_has_every_piece_of_evidence_with_its_phrase() -> None:
    told = SCHEMA["$defs"]["Finding"]["properties"]["evidence"]["properties"]
    assert {key: entry["description"] for key, entry in told.items()} == {key.value: key.phrase for key in EvidenceKey}


WRONG: list[tuple[str, Any]] = [
    ("schema", "other"),
    ("version", 99),
    ("title", 3),
    ("findings", {}),
    ("findings", [{"kind": "logic"}]),
    ("findings", [{"kind": "no kind", "subject": "", "message": ""}]),
    ("findings", [{"kind": "logic", "subject": "", "message": "", "surprise": 1}]),
    ("findings", [{"kind": "logic", "subject": "", "message": "", "flow": [{"name": "a"}]}]),
    ("findings", [{"kind": "logic", "subject": "", "message": "", "evidence": []}]),
    ("coverage", {"checked": {"outputs": -1}}),
    ("coverage", {"detection_limit": {"x": "much"}}),
    ("coverage", {"regions": [{"name": "f", "calls": 2**65}]}),
    ("coverage", None),
]


@pytest.mark.parametrize(("member", "value"), WRONG)
def test_what_it_forbids_is_not_read(member: str, value: Any) -> None:
    raw = {**json.loads(Report((), CHECKED).to_json()), member: value}
    raw.pop("verdict")
    assert not VALIDATOR.is_valid(raw)
    with pytest.raises(CheckedBackendError, match="not a report"):
        Report.from_json(json.dumps(raw))


def test_the_command_prints_it_and_reads_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = runner(capsys)("report", "--schema")
    assert (code, err) == (0, "")
    assert json.loads(out) == SCHEMA
    VALIDATOR.check_schema(SCHEMA)
