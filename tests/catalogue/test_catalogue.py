"""The catalogue is readable, its programs run in eager, and each shows where the catalogue says so."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from markupsafe import escape

from checked_backend.errors import FuzzError
from checked_backend.fuzz.generate.defined import runs_alike
from checked_backend.fuzz.results import ProgramResult
from checked_backend.runs.case import Status
from tests.catalogue import __main__ as command
from tests.catalogue.entries import Entry, here, read
from tests.catalogue.page import render_page, status

ENTRIES = read()


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_entries_are_whole_and_run_in_eager(entry: Entry) -> None:
    assert entry.shows
    if entry.shows.get(here(), True):
        assert runs_alike(entry.decoded()) is not (entry.kind == "exception")  # of that kind eager raises


def test_the_page_shows_all_of_them(tmp_path: Path) -> None:
    page = tmp_path / "miscompiles.html"
    assert command.main(["--page", str(page)]) == 0
    text = page.read_text(encoding="utf-8")
    for entry in ENTRIES:
        assert text.count(escape(entry.name)) >= 3
        assert entry.upstream in text
    assert "<script" not in text
    assert text.count("<article") == len(ENTRIES)


def test_a_page_escapes_what_entries_say() -> None:
    assert "<b>bold" not in render_page([replace(ENTRIES[0], name="<b>bold</b>")])


@pytest.mark.parametrize(
    ("shows", "words"),
    [
        ({"2.11": True, "2.13": True, "2.15": False}, "Shows on torch 2.11 and 2.13; fixed in 2.15"),
        ({"2.9": False, "2.11": True}, "Shows on torch 2.11; not yet on 2.9"),
        ({"2.11": True, "2.13": True, "2.15": True}, "Shows on torch 2.11, 2.13, 2.15"),
        ({"2.13": False}, "Shows on no torch that was tried (2.13)"),
    ],
)
def test_the_page_says_what_was_fixed(shows: dict[str, bool], words: str) -> None:
    assert status(replace(ENTRIES[0], shows=shows)) == words


@pytest.mark.slow
@pytest.mark.inductor
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_entries_show_where_the_catalogue_says_so(entry: Entry) -> None:
    if here() not in entry.shows:
        pytest.skip(f"not tried on torch {here()}; python -m tests.catalogue --write")
    assert entry.shows_now() is entry.shows[here()]


@pytest.mark.parametrize(
    ("found", "shows"),
    [
        (ProgramResult(Status.FAIL, "wrong", kind="logic"), True),
        (ProgramResult(Status.PASS), False),
        (ProgramResult(Status.INCONCLUSIVE, "no compiler"), None),
        (ProgramResult(Status.FAIL, "raises", kind="crash"), None),
    ],
)
def test_only_what_passes_was_fixed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], found: ProgramResult, shows: bool | None
) -> None:
    entry = next(entry for entry in ENTRIES if entry.kind == "logic" and all(entry.shows.values()))
    monkeypatch.setattr(command, "look", lambda known: [(known[0], found)])
    monkeypatch.setattr(command, "read", lambda: [entry])
    assert entry.meaning(found) is shows
    assert command.main([]) == (2 if shows is None else 0)
    assert {True: "shows", False: "fixed", None: "NO VERDICT"}[shows] in capsys.readouterr().out


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": "\x1b[31mred"},
        {"compiler": "mine.py:backend"},
        {"shows": {"newest": True}},
        {"shows": {"2.13": "yes"}},
        {"upstream": "javascript:alert(1)"},
        {"program": {"version": 1}},
        {"more": 1},
    ],
)
def test_an_entry_that_is_none_is_refused(tmp_path: Path, wrong: dict[str, object]) -> None:
    path = tmp_path / "entries.json"
    path.write_text(json.dumps([{**asdict(ENTRIES[0]), **wrong}]), encoding="utf-8")
    with pytest.raises((ValueError, FuzzError)):
        read(path)
