"""Pictures of numbers."""

from __future__ import annotations

from dataclasses import replace
from xml.etree import ElementTree

import pytest

from checked_backend.findings import Finding, Kind, Metrics, NoiseScale
from checked_backend.report.pictures import error_chart

METRICS = Metrics(40, 40, 0.1, 0.1, 7, 0.01, 1.0, 3.0, 0, 0, 0, 0, 0, (0,), 1.0, 1.25)
FINDING = Finding(Kind.LOGIC, "output[0]", "wrong", metrics=METRICS, noise=NoiseScale(1e-7, 5e-7, "noise"))


def bars(*findings: Finding) -> list[tuple[str, float]]:
    chart = error_chart(findings)
    assert chart is not None
    drawn = ElementTree.fromstring(chart)
    return [(str(one.get("class")), float(str(one.get("width")))) for one in drawn.iter("rect")]


def test_an_error_is_as_long_as_it_is_greater_than_the_noise() -> None:
    (error, long), (noise, short) = bars(FINDING)
    assert (error, noise) == ("error", "noise")
    assert long > short > 0
    smaller = replace(FINDING, metrics=replace(METRICS, rmse=1e-5))
    first, _, second, _ = (width for _, width in bars(FINDING, smaller))
    assert first > second


def test_it_reads_as_text_and_names_are_escaped() -> None:
    chart = error_chart([replace(FINDING, subject='<script>"&'), FINDING])
    assert chart is not None
    assert "<script>" not in chart
    assert "output[0]: error 0.01, noise 1e-07" in str(ElementTree.fromstring(chart).get("aria-label"))


@pytest.mark.parametrize(
    "finding",
    [
        replace(FINDING, metrics=None),
        replace(FINDING, metrics=replace(METRICS, reference_rms=0.0)),
        replace(FINDING, metrics=replace(METRICS, rmse=float("nan"))),
        replace(FINDING, metrics=replace(METRICS, reference_rms=float("inf"))),
    ],
)
def test_what_has_no_number_has_no_bar(finding: Finding) -> None:
    assert error_chart([finding]) is None
    assert len(bars(FINDING, finding)) == 2


def test_a_long_list_is_cut_and_extreme_numbers_stay_inside() -> None:
    tiny = replace(FINDING, metrics=replace(METRICS, rmse=1e-300), noise=NoiseScale(0.0, 0.0, ""))
    huge = replace(FINDING, metrics=replace(METRICS, rmse=1e300))
    drawn = bars(*[tiny, huge] * 40)
    assert len(drawn) == 48
    assert all(0 <= width <= 420 for _, width in drawn)
