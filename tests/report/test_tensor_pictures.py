"""Heat maps and histograms."""

from __future__ import annotations

import math
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from checked_backend.findings import Distribution
from checked_backend.report.tensor_pictures import heat_map, heat_words, histogram

SPREAD = Distribution((2, 3), (2, 3), ((0.0, 1e-6, 1e-6), (0.1, math.inf, 1e-3)), (0, 3, 0, 12_345))


def paths(picture: object) -> dict[str, str]:
    assert picture is not None
    found = ElementTree.fromstring(str(picture)).iter("path")
    return {str(one.get("class")): str(one.get("d")) for one in found}


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
    picture = histogram(SPREAD)
    assert picture is not None
    drawn = ElementTree.fromstring(picture)
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
    picture = histogram(replace(SPREAD, ulps=(2**64,) * 80))
    assert picture is not None
    assert len(list(ElementTree.fromstring(picture).iter("rect"))) == 72
