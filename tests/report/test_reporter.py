"""The part of answering findings that every backend shares: grading, setting aside, ledgers, one warning."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from checked_backend.errors import DivergenceWarning
from checked_backend.findings import Finding, Kind, RegionInfo, Severity, Skip
from checked_backend.options import CheckOptions, InterpreterOptions
from checked_backend.report.reporter import Reporter
from checked_backend.report.session import collect
from tests.support import faults

REGION = RegionInfo("net [0/0]", ("net.py:3 in net",), 4)
WRONG = Finding(Kind.LOGIC, "output[0]", "it is wrong", detail="logic")
STRIDES = Finding(Kind.STRUCTURE, "output[1]", "other strides", detail="structure.stride", expected="1", actual="2")


class Told(Reporter):
    """A reporter that adds findings and answers them with the warning about layout alone."""

    def report(self, findings: Sequence[Finding]) -> tuple[Finding, ...]:
        reported, ignored = self._graded(findings)
        new = self._add(reported, ignored)
        self._warn_of_layout([finding for finding in new if finding.severity is Severity.WARNING])
        return new


@pytest.fixture(params=(CheckOptions, InterpreterOptions), ids=["numcheck", "debug_interpreter"])
def options(request: pytest.FixtureRequest) -> Any:
    return request.param


def test_layout_alone_fails_only_where_that_was_asked_for(options: Any) -> None:
    with collect() as session, pytest.warns(DivergenceWarning, match="has other strides than in eager"):
        assert [finding.fails for finding in Told(REGION, options()).report([WRONG, STRIDES])] == [True, False]
    assert [finding.severity for finding in session.ledger.findings()] == [Severity.ERROR, Severity.WARNING]
    assert all(finding.fails for finding in Told(REGION, options(layout="raise")).report([WRONG, STRIDES]))


def test_layout_that_matters_is_no_warning(options: Any) -> None:
    matters = Finding(
        Kind.STRUCTURE, "output[1]", "", detail="structure.requires_grad", more_than_layout="gradients are lost"
    )
    (new,) = Told(REGION, options()).report([matters])
    assert new.fails


@pytest.mark.parametrize(
    ("asked", "finding"),
    [({"ignore": ("output[0]",)}, WRONG), ({"ignore": ("logic",)}, WRONG), ({"layout": "ignore"}, STRIDES)],
)
def test_what_the_user_ignores_is_in_the_coverage_alone(options: Any, asked: dict[str, Any], finding: Finding) -> None:
    with collect() as session:
        assert not Told(REGION, options(**asked)).report([finding])
    assert [ignored.detail for ignored in session.ledger.coverage().ignored] == [finding.detail]
    assert not session.ledger.findings()


def test_layout_is_told_once_in_a_session_however_often_its_lines_are_compiled(options: Any) -> None:
    with collect():
        with pytest.warns(DivergenceWarning):
            Told(REGION, options()).report([STRIDES])
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            Told(REGION, options()).report([STRIDES])
    with pytest.warns(DivergenceWarning):
        Told(REGION, options()).report([STRIDES])


def test_layout_is_recorded_without_a_warning(options: Any) -> None:
    with collect() as session:
        assert Told(REGION, options(on_divergence="record")).report([STRIDES])
    assert [finding.detail for finding in session.ledger.findings()] == ["structure.stride"]


def test_new_is_what_no_earlier_call_of_the_region_had_in_any_session(options: Any) -> None:
    reporter = Told(REGION, options())
    assert reporter.report([WRONG]) == (WRONG,)
    with collect() as session:
        assert reporter.report([WRONG]) == ()
    assert session.ledger.findings() == (WRONG,)


def test_counts_skips_and_notes_reach_every_active_session(options: Any) -> None:
    reporter = Reporter(REGION, options())
    with collect() as outer, collect() as inner:
        reporter.count({"outputs": 2})
        reporter.skip(Skip("inputs", "they are views"))
        reporter.note("a remark")
    for session in (outer, inner):
        coverage = session.ledger.coverage()
        assert coverage.checked == {"outputs": 2}
        assert coverage.skipped == (Skip("inputs", "they are views", region=REGION.name),)
        assert coverage.notes == ("a remark",)


def test_reports_say_which_compiler_was_checked() -> None:
    def compiler(gm: Any, _inputs: Any) -> Any:
        return gm

    given: list[Any] = [{"compiler": "aot_eager"}, {"compiler": compiler}, {"compiler_options": {"max_autotune": True}}]
    options = [CheckOptions(**one) for one in given]
    with collect() as session:
        assert "compiled by" not in session.report.environment
        for one in [*options, *options]:
            Reporter(REGION, one)._add_calls(calls=1, checked=1)
        Reporter(REGION, InterpreterOptions())._add_calls(calls=1, checked=1)
    name = compiler.__qualname__
    assert session.report.environment["compiled by"] == (
        f"aot_eager, {__name__}.{name}, inductor with {{'max_autotune': True}}"
    )


@pytest.mark.parametrize("policy", ["warn", "raise"])
def test_a_warning_names_a_file_of_the_user(policy: str, tmp_path: object) -> None:
    fault = faults.wrong_value() if policy == "warn" else faults.wrong_stride()
    options = {"compiler": fault, "on_divergence": policy, "localize": False, "report_dir": str(tmp_path)}
    compiled = torch.compile(lambda x: x.sin() + 1, backend="numcheck", options=options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compiled(torch.ones(3, 4))
    [warning] = [one for one in caught if issubclass(one.category, DivergenceWarning)]
    assert warning.filename == __file__
