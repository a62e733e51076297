"""The table of what each mechanism is for has a row for each, and names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.calibration.ablation import MECHANISMS

TESTS = Path(__file__).parents[1]
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in Path(__file__).with_name("ABLATION.md").read_text(encoding="utf-8").splitlines()
    if line.startswith("|")
][2:]


def test_every_mechanism_has_a_row() -> None:
    assert sorted(row[0] for row in ROWS) == sorted(MECHANISMS)


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_a_row_says_what_goes_wrong_and_names_a_test(row: list[str]) -> None:
    _, sample, without, test = row
    assert re.fullmatch(r"-|0|\d+ (missed|undecided|failed)", sample)
    assert len(without) > 10
    for place in re.findall(r"`([^`]+)`", test):
        file, _, name = place.partition("::")
        found = list(TESTS.rglob(file)) if file.endswith(".py") else [*TESTS.glob(f"{file.removeprefix('tests/')}*")]
        found += [path for path in TESTS.joinpath("cases").glob("*.py") if re.search(rf"\b{file}\b", path.read_text())]
        assert found, f"{place} is not there"
        assert not name or any(f"def {name}(" in path.read_text(encoding="utf-8") for path in found)
