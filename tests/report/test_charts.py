"""Pictures of numbers: the error of each result, heat maps and histograms."""

from __future__ import annotations

import math
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from checked_backend.findings import Distribution, Finding, Kind, Metrics, NoiseScale
from checked_backend.report.charts import error_chart, heat_map, heat_words, histogram

METRICS = Metrics(40, 40, 0.1, 0.1, 7, 0.01, 1.0, 3.0, 0, 0, 0, 0, 0, (0,), 1.0, 1.25)
FINDING = Finding(Kind.LOGIC, "output[0]", "wrong", metrics=METRICS, noise=NoiseScale(1e-7, 5e-7, "noise"))


def bars(*findings: Finding) -> list[tuple[str, float]]:
    drawn = ElementTree.fromstring(error_chart(findings))
    return [(str(one.get("class")), float(str(one.get("width")))) for one in drawn.iter("rect")]


def test_an_error_is_as_long_as_it_is_greater_than_the_noise() -> None:
    (error, long), (noise, short) = bars(FINDING)
    assert (error, noise) == ("error", "noise")
    assert long > short > 0
    first, _, second, _ = (width for _, width in bars(FINDING, replace(FINDING, metrics=replace(METRICS, rmse=1e-5))))
    assert first > second


def test_it_reads_as_text_and_names_are_escaped() -> None:
    chart = error_chart([replace(FINDING, subject='<script>"&'), FINDING])
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
    drawn = bars(*[tiny, replace(FINDING, metrics=replace(METRICS, rmse=1e300))] * 40)
    assert len(drawn) == 48
    assert all(0 <= width <= 420 for _, width in drawn)


SPREAD = Distribution((2, 3), (2, 3), ((0.0, 1e-6, 1e-6), (0.1, math.inf, 1e-3)), (0, 3, 0, 12_345))


def paths(picture: object) -> dict[str, str]:
    return {str(one.get("class")): str(one.get("d")) for one in ElementTree.fromstring(str(picture)).iter("path")}


def test_a_block_is_drawn_the_stronger_the_more_it_differs() -> None:
    drawn = paths(heat_map(SPREAD))
    assert drawn["h1"] == "M12 0h24v12H12z"  # two alike are one
    assert drawn["h8"].startswith("M0 12")
    assert drawn["hx"].startswith("M12 12")  # NaN on one side
    assert len(drawn) == 4
    assert heat_words(SPREAD) == (
        "Greatest difference in each block of the tensor (2 x 3): 5 of 6 blocks differ, by 1e-06 to 0.1; 1 has NaN or "
        "infinity on one side only."
    )


def test_a_tall_tensor_fits_a_window() -> None:
    picture = heat_map(replace(SPREAD, blocks=((1.0,) * 16,) * 96, shape=(96, 16), matrix=(96, 16)))
    assert 'style="max-width:86px"' in str(picture)  # 520 high


def test_where_nothing_differs_nothing_is_drawn() -> None:
    assert heat_map(replace(SPREAD, blocks=((0.0,),))) is None
    assert heat_map(replace(SPREAD, blocks=())) is None
    assert histogram(replace(SPREAD, ulps=())) is None
    assert histogram(replace(SPREAD, ulps=(0, 0))) is None


def test_the_histogram_reads_as_text() -> None:
    drawn = ElementTree.fromstring(histogram(SPREAD))
    assert drawn.get("aria-label") == "Elements by their difference: 1 ulp: 3; 4 to 7 ulp: 1.2e+04"
    tall = [float(str(one.get("height"))) for one in drawn.iter("rect")]
    assert tall[3] > tall[1] > tall[0] == 0.0


@pytest.mark.parametrize("strange", [math.nan, -1.0, 1e308, 5e-324, math.inf, -math.inf])
def test_strange_and_ragged_blocks_are_drawn(strange: float) -> None:
    for blocks in (((strange,),), ((strange, 1.0), (), (1.0,)), ((strange,) * 64,) * 64):
        found = replace(SPREAD, blocks=blocks, shape=(2**64,) * 60, matrix=(0, 0))
        assert len(heat_words(found)) < 2000
        picture = heat_map(found)
        assert picture is None or len(picture) < 100_000


def test_huge_counts_are_drawn() -> None:
    assert len(list(ElementTree.fromstring(histogram(replace(SPREAD, ulps=(2**64,) * 80))).iter("rect"))) == 72
