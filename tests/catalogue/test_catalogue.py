"""The catalogue is readable, its programs run in eager, and each shows where the catalogue says so."""

from __future__ import annotations

import pytest

from checked_backend.findings import Kind
from checked_backend.fuzz.generate.make import runs_alike
from tests.catalogue.entries import Entry, here, read

ENTRIES = read()


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_entries_are_whole_and_run_in_eager(entry: Entry) -> None:
    assert entry.compiler in ("eager", "aot_eager", "inductor")
    assert Kind(entry.kind)
    assert entry.shows
    assert entry.upstream.startswith("https://") or not entry.upstream
    assert runs_alike(entry.decoded()) is not (entry.kind == "exception")  # of that kind eager raises


@pytest.mark.slow
@pytest.mark.inductor
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_entries_show_where_the_catalogue_says_so(entry: Entry) -> None:
    if here() not in entry.shows:
        pytest.skip(f"not tried on torch {here()}; python -m tests.catalogue --write")
    assert entry.shows_now() is entry.shows[here()]
