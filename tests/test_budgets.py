"""Budgets are printed and held, in a made-up tree, and the table of this one names each file."""

from __future__ import annotations

import ast
from pathlib import Path
from textwrap import dedent

import pytest

from tests import budgets
from tests.budgets import Row, main, rooms_of, rows, set_to_today, single_importers, sources

TABLE = """\
# Numbers go up for a reason [of one's own].
[package]
lines = 6
goal = 4

[tests]
lines = 1
goal = 1

[rooms.first] # of two
paths = ["first"]
lines = 5 # today
goal = 3

[rooms.second]
lines = 1
goal = 1_000
paths = ["alone.py"]
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    files = {
        "checked_backend/first/__init__.py": "a = 1\nb = 2\n",
        "checked_backend/first/inner/loop.c": "int a;\nint b;\n\n",
        "checked_backend/first/data.json": "[\n]\n",
        "checked_backend/alone.py": "c = 3\n",
        "tests/test_it.py": "d = 4\n",
        "tests/budgets.toml": TABLE,
    }
    for name, text in files.items():
        write(tmp_path / name, text)
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def test_rooms_at_their_budgets_pass(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([], root) == 0
    out, err = capsys.readouterr()
    assert [line.split() for line in out.splitlines()] == [
        ["room", "lines", "budget", "over", "goal", "to", "go"],
        ["first", "5", "5", "+0", "3", "2"],
        ["second", "1", "1", "+0", "1,000", "0"],
        ["package", "6", "6", "+0", "4", "2"],
        ["tests", "1", "1", "+0", "1", "0"],
    ]
    assert not err


@pytest.mark.parametrize(
    ("file", "above", "under"),
    [
        ("checked_backend/first/more.py", ["first", "package"], ["second", "tests"]),
        ("checked_backend/first/more.c", ["first", "package"], ["second", "tests"]),
        ("tests/first/test_more.py", ["tests"], ["first", "second", "package"]),
    ],
)
def test_what_is_above_its_budget_fails_and_is_named(
    root: Path, capsys: pytest.CaptureFixture[str], file: str, above: list[str], under: list[str]
) -> None:
    write(root / file, "\n\n")
    assert main([], root) == 1
    err = capsys.readouterr().err
    assert all(f"{name} has" in err for name in above)
    assert "2 above its budget" in err
    assert not [name for name in under if f"{name} has" in err]


def test_a_room_under_its_budget_passes(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(root / "checked_backend/first/__init__.py", "")
    assert main([], root) == 0
    assert ["first", "3", "5", "-2", "3", "0"] in [line.split() for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize(
    ("paths", "file", "said"),
    [
        # no room's, though its name begins like one's
        ('"alone.py"', "first_class.py", "checked_backend/first_class.py is in no room. Name it"),
        ('"gone.py", "alone.py"', "first/more.py", "checked_backend/gone.py of the room"),
        ('"alone.py", "first/inner"', "first/more.py", "first/inner/loop.c is in the rooms first and second."),
    ],
)
def test_a_file_that_is_not_in_one_room_is_named(
    root: Path, capsys: pytest.CaptureFixture[str], paths: str, file: str, said: str
) -> None:
    write(root / "checked_backend" / file, "")
    write(root / "tests/budgets.toml", TABLE.replace('"alone.py"', paths))
    assert main([], root) == 1
    assert said in capsys.readouterr().err


def test_numbers_of_today_are_written_and_all_else_stays(root: Path) -> None:
    write(root / "checked_backend/first/more.py", "\n" * 2000)
    assert main([], root) == 1
    assert main(["--set"], root) == 0
    after = root.joinpath("tests/budgets.toml").read_text(encoding="utf-8")
    assert after == TABLE.replace("lines = 6", "lines = 2_006").replace("lines = 5 #", "lines = 2_005 #")
    assert rows(root)[0] == Row("first", 2005, 2005, 3)
    assert set_to_today(after, {row.name: row.lines for row in rows(root)}) == after


def test_each_file_of_the_package_is_in_one_room() -> None:
    table = budgets.read(budgets.ROOT)
    files = sources(budgets.ROOT / budgets.PACKAGE)
    assert len(files) > 100
    assert not {file: rooms for file in files if len(rooms := rooms_of(file, table)) != 1}


def test_files_with_one_importer_are_listed(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    package = root / "checked_backend"
    files = {
        "__init__.py": "",
        "user.py": """
            import checked_backend.imported
            from checked_backend import as_name, twice
            from checked_backend.room import name
            def function():
                from checked_backend import in_function
                importlib.import_module("checked_backend.by_name")
                importlib.import_module(f"checked_backend.{computed}")
            """,
        "room/__init__.py": "from .relative import name\nfrom . import sibling\nfrom .. import twice\n",
        "room/sibling.py": "from ..above import name\nfrom checked_backend.room import sibling\n",
    }
    names = ("imported", "as_name", "twice", "in_function", "by_name", "computed", "room/relative", "above", "nobodys")
    for name, text in {**files, **{f"{name}.py": "\n" for name in names}}.items():
        write(package / name, dedent(text))
    assert {file: importer for file, (importer, _) in single_importers(package).items()} == {
        "imported.py": "user.py",
        "as_name.py": "user.py",
        "in_function.py": "user.py",
        "by_name.py": "user.py",
        "room/__init__.py": "user.py",
        "room/relative.py": "room/__init__.py",
        "room/sibling.py": "room/__init__.py",
        "above.py": "room/sibling.py",
    }
    assert main(["--importers"], root) == 0
    out = capsys.readouterr().out
    assert "1  above.py  is imported by  room/sibling.py" in out
    assert out.endswith("11  lines in 8 files that only one file imports\n")


@pytest.mark.parametrize(
    ("source", "package", "found"),
    [
        ("from . import b", "p.a", {"p.a.b"}),
        ("from .b import c", "p.a", {"p.a.b"}),
        ("from .. import a", "p.a", {"p.a"}),
        ("from ..a.b import name", "p.a", {"p.a.b"}),
        ("import os, p.a", "p", {"p.a"}),
        ("from p import name", "p", {"p"}),
        ("from os import path", "p", set()),
        ("load('p.a.b')", "p", {"p.a.b"}),
        ("'see p.a.b'", "p", set()),
    ],
)
def test_what_a_file_imports_is_seen(source: str, package: str, found: set[str]) -> None:
    modules = dict.fromkeys(("p", "p.a", "p.a.b"), "")
    assert {*budgets.imported(ast.parse(source), package, modules)} == found
