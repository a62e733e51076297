"""The time of each test is recorded, and what is dear is told."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests import durations
from tests.support.pytest_runs import run

TESTS = """
import time

import pytest

@pytest.fixture
def slowly():
    time.sleep(0.2)
    yield
    time.sleep(0.2)

def test_waits(slowly): time.sleep(0.2)
def test_fails(): assert False

@pytest.mark.process
def test_marked(): pass
"""
RECORDED = """\
["tests/b.py::test_fast", "default", 0.21]
["tests/a.py::test_dear[x::y]", "process", 2.04]
["tests/a.py::test_dear[x::y]", "process", 3.04]
["tests/a.py::test_slow", "slow", 10.0]
["tests/a.py::test_fast", "default", 0.11]
["tests/b.py::test_too", "default", 0.22]
"""
TABLE = {
    "tests/a.py": {"default": 0.1, "process": 3.0, "slow": 10.0, "tests": {"test_dear[x::y]": 3.0, "test_slow": 10.0}},
    "tests/b.py": {"default": 0.4},
}


@pytest.mark.process
@pytest.mark.parametrize("words", [(), ("-p", "xdist.plugin", "-n", "2")], ids=["one process", "two workers"])
def test_runs_add_the_time_of_each_test(tmp_path: Path, words: tuple[str, ...]) -> None:
    file = tmp_path / "times"
    run(tmp_path, TESTS, "--durations-file", file, *words)
    run(tmp_path, TESTS, "--durations-file", file, *words, "-m", "process")
    recorded = {name: (kind, seconds) for name, kind, seconds in map(json.loads, file.read_text().splitlines())}
    assert {name: kind for name, (kind, _) in recorded.items()} == {
        "test_it.py::test_waits": "default",
        "test_it.py::test_fails": "default",
        "test_it.py::test_marked": "process",
    }
    assert 0.6 <= recorded["test_it.py::test_waits"][1] < 10
    assert recorded["test_it.py::test_fails"][1] < 0.6


def test_the_table_has_files_and_dear_tests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "times").write_text(RECORDED)
    monkeypatch.setattr(durations, "TABLE", tmp_path / "durations.json")
    assert durations.main(["--refresh", str(tmp_path / "times")]) == 0
    refreshed = capsys.readouterr().out
    assert json.loads((tmp_path / "durations.json").read_text()) == durations.known() == TABLE
    assert durations.main([]) == 0
    assert capsys.readouterr().out == refreshed
    (tmp_path / "none").write_text("")
    assert durations.main(["--refresh", str(tmp_path / "none")]) == 3
    assert durations.known() == TABLE
    assert [line.split() for line in refreshed.splitlines() if line.startswith("  ")] == [
        ["13.1", "tests/a.py"],
        ["0.4", "tests/b.py"],
        ["10.0", "tests/a.py::test_slow"],
        ["3.0", "tests/a.py::test_dear[x::y]"],
    ]


@dataclass(frozen=True)
class Item:
    """What the order of tests rests on."""

    nodeid: str
    marks: tuple[pytest.Mark, ...] = ()

    def iter_markers(self) -> Iterator[pytest.Mark]:
        return iter(self.marks)


def test_workers_get_the_dearest_file_first() -> None:
    given = [Item("tests/new.py::test"), *(Item(f"tests/{file}.py::test_{n}") for file in "ab" for n in (2, 1))]
    for marks, order in ((), ["b", "b", "a", "a", "new"]), ((pytest.mark.slow.mark,), ["a", "a", "b", "b", "new"]):
        marked = [replace(item, marks=marks) if item.nodeid.endswith("a.py::test_1") else item for item in given]
        items = durations.dearest_first(marked, TABLE)
        assert [item.nodeid.removeprefix("tests/").partition(".")[0] for item in items] == order
        assert [item.nodeid for item in items if "a.py" in item.nodeid] == ["tests/a.py::test_2", "tests/a.py::test_1"]


def test_what_took_a_second_is_left_to_longer_runs() -> None:
    items = [Item("tests/a.py::test_dear[x::y]"), Item("tests/a.py::test_fast"), Item("tests/new.py::test_dear[x::y]")]
    assert durations.dear(items, TABLE) == items[:1]
