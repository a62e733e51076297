"""Cases, settings and outcomes as data."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from checked_backend.errors import SuiteError
from checked_backend.findings import Verdict
from checked_backend.sweep.case import Case, CaseResult, Settings, decoded
from checked_backend.sweep.status import Status


def test_the_key_tells_every_case_from_every_other() -> None:
    case = Case("s", "m")
    others = [
        replace(case, **change)
        for change in (
            {"suite": "t"},
            {"model": "n"},
            {"mode": "training"},
            {"dtype": "amp"},
            {"device": "cuda"},
            {"compiler": "eager"},
            {"dynamic": True},
        )
    ]
    assert len({case.key, *(other.key for other in others)}) == 8


def test_only_what_changes_the_result_changes_the_state() -> None:
    base = Settings().digest("source")
    same = (Settings(timeout=1.0), Settings(tags={"slow": "x"}), Settings(localize=True))
    assert {settings.digest("source") for settings in same} == {base}
    other = (
        Settings(batch_size=2),
        Settings(run_as="amp"),
        Settings(ignore_outputs={"o": "x"}),
        Settings(known_fails={"logic": "x"}),
        Settings(noise={"o": (0.1, "x")}),
        Settings(compiler_options={"a": 1}),
        Settings(optimizer="Adam"),
    )
    assert len({base, Settings().digest("other"), *(settings.digest("source") for settings in other)}) == 9


def test_an_outcome_survives_json() -> None:
    full = CaseResult(Status.HANG, "m", "s", "e", 1.5, 7, 1e-6, "{}", "log", "host")
    assert CaseResult.from_json(full.to_json()) == full
    assert CaseResult.from_json(CaseResult(Status.PASS).to_json()) == CaseResult(Status.PASS)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "not JSON"),
        ("[]", "expected an object, got list"),
        ("{}", "missing 1 required positional argument: 'status'"),
        ('{"status": "fine"}', "status got 'fine'; expected one of pass, fail"),
        ('{"status": "pass", "seconds": "1"}', "seconds got '1'; expected float"),
        ('{"status": "pass", "seconds": true}', "seconds got True; expected float"),
        ('{"status": "pass", "log": null}', "log got None; expected str"),
        ('{"status": "pass", "noise": "x"}', "noise got 'x'; expected float | None"),
        ('{"status": "pass", "seconds": NaN}', "seconds got nan; expected a number below"),
        (
            '{"status": "pass", "peak": 1000000000000000000000}',
            "peak got 1000000000000000000000; expected a number below",
        ),
        ('{"status": "pass", "peak": 1%s}' % ("0" * 5000), "not JSON"),
        ("[" * 100000, "not JSON"),
    ],
)
def test_a_strangers_outcome_is_refused_with_the_field(text: str, why: str) -> None:
    with pytest.raises(SuiteError) as caught:
        CaseResult.from_json(text)
    assert why in str(caught.value)


def test_a_case_of_a_stranger() -> None:
    assert decoded(Case, json.loads(json.dumps({"suite": "s", "model": "m", "more": 1})), "x") == Case("s", "m")
    with pytest.raises(SuiteError, match="x: dynamic got 'no'; expected bool"):
        decoded(Case, {"suite": "s", "model": "m", "dynamic": "no"}, "x")


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
