"""Cases and results as data."""

from __future__ import annotations

from dataclasses import replace

import pytest

from checked_backend import SuiteError, Verdict
from checked_backend.runs.case import Case, CaseResult, Status


def test_the_key_tells_every_case_from_every_other() -> None:
    case = Case("s", "m")
    changes = (
        ("suite", "t"),
        ("model", "n"),
        ("mode", "training"),
        ("dtype", "amp"),
        ("device", "cuda"),
        ("dynamic", True),
    )
    others = [replace(case, **{name: value}) for name, value in (*changes, ("compiler", "eager"))]
    assert len({case.key, *(other.key for other in others)}) == 8


def test_a_result_survives_json() -> None:
    full = CaseResult(Status.HANG, "m", "s", "e", 1.5, 7, 1e-6, "{}", "log", "host")
    assert CaseResult.from_json(full.to_json()) == full
    assert CaseResult.from_json(CaseResult(Status.PASS).to_json()) == CaseResult(Status.PASS)
    assert CaseResult.from_json(CaseResult(Status.ERROR, "half a pair: \ud800").to_json()).message == "half a pair: ?"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "Invalid JSON"),
        ("[]", "Input should be an object"),
        ("{}", "status: Field required"),
        ('{"status": "fine"}', "status: Input should be 'pass', 'fail'"),
        ('{"status": "pass", "seconds": "1"}', "seconds: Input should be a valid number"),
        ('{"status": "pass", "seconds": true}', "seconds: Input should be a valid number"),
        ('{"status": "pass", "log": null}', "log: Input should be a valid string"),
        ('{"status": "pass", "noise": "x"}', "noise: Input should be a valid number"),
        ('{"status": "pass", "seconds": NaN}', "seconds: Input should be a finite number"),
        ('{"status": "pass", "peak": 1000000000000000000000}', "peak: Input should be less than"),
        ('{"status": "pass", "peak": 1%s}' % ("0" * 5000), "Invalid JSON"),
        ("[" * 100000, "Invalid JSON"),
        (r'{"status": "pass", "log": "\ud800"}', "Invalid JSON"),
    ],
)
def test_a_strangers_result_is_refused_with_the_field(text: str, why: str) -> None:
    with pytest.raises(SuiteError) as caught:
        CaseResult.from_json(text)
    assert str(caught.value).startswith(f"a worker's result: {why}")


@pytest.mark.parametrize("status", list(Status))
def test_what_each_status_means_for_the_exit_code(status: Status) -> None:
    verdict = CaseResult(status).verdict
    if status is Status.PASS:
        assert verdict is Verdict.PASS
    elif status is Status.SKIPPED:
        assert verdict is None
    else:
        assert verdict in (Verdict.FAIL, Verdict.INCONCLUSIVE)
        assert CaseResult(status, expected="known").verdict is None
    assert status.means
