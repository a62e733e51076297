"""The database: what is kept, what a stranger's file can do, merging."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from checked_backend.errors import SuiteError
from checked_backend.sweep.case import Case
from checked_backend.sweep.database import Attempt, Database
from checked_backend.sweep.file import is_database
from tests.support.sweep_tools import VERSIONS, failing, outcome, run_with


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a.db"
    with Database(path, write=True) as database:
        run = run_with(database, {"a": failing(), "b": outcome("hang", message="slow", seconds=2.0)})
    assert is_database(path)
    with Database(path) as database:
        assert database.runs() == [run]
        results = database.results(run)
    assert [(r.case.model, r.outcome) for r in results] == [
        ("a", failing()),
        ("b", outcome("hang", message="slow", seconds=2.0)),
    ]


def test_the_same_versions_and_name_are_the_same_run(tmp_path: Path) -> None:
    with Database(tmp_path / "a.db", write=True) as database:
        first = database.begin("", VERSIONS)
        assert database.begin("", dict(reversed(VERSIONS.items()))) == first
        assert database.begin("again", VERSIONS) != first
        assert database.begin("", {**VERSIONS, "torch": "2.14.0"}) != first
        assert len(database.runs()) == 3


def test_a_result_is_never_replaced_but_what_a_rule_says_is_the_latest(tmp_path: Path) -> None:
    with Database(tmp_path / "a.db", write=True) as database:
        run = database.begin("", VERSIONS)
        case = Case("s", "m")
        database.add(run, Attempt(case, 0, "", "skipped s", outcome("skipped")))
        database.add(run, Attempt(case, 0, "", "s", outcome("fail")))
        database.add(run, Attempt(case, 0, "", "s", outcome("pass")))
        assert [r.outcome.status.value for r in database.results(run)] == ["skipped", "fail"]
        database.add(run, Attempt(case, 0, "", "skipped s", outcome("skipped")))
        assert [r.outcome.status.value for r in database.results(run)] == ["fail", "skipped"]


def test_two_sweeps_do_not_write_to_one_file(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    with Database(path, write=True), pytest.raises(SuiteError) as caught:
        Database(path, write=True)
    assert f"{path}: another sweep writes to it (process {os.getpid()}); wait for it" in str(caught.value)
    Database(path, write=True).close()


@pytest.mark.process
def test_what_is_committed_survives_kill(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    code = f"""
    import os, signal
    from pathlib import Path
    from checked_backend.sweep.database import Database
    from tests.support.sweep_tools import outcome, run_with
    run_with(Database(Path({str(path)!r}), write=True), {{"a": outcome(), "b": outcome("fail")}})
    os.kill(os.getpid(), signal.SIGKILL)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=False, cwd=Path(__file__).parents[2])
    assert done.returncode == -9
    with Database(path, write=True) as database:
        assert [r.outcome.status.value for r in database.results(database.runs()[0])] == ["pass", "fail"]


def test_merging_twice_changes_nothing_and_keeps_both_attempts(tmp_path: Path) -> None:
    for name, status in (("a", "pass"), ("b", "fail")):
        with Database(tmp_path / f"{name}.db", write=True) as part:
            run_with(part, {"shared": outcome(status, host=name), name: outcome(host=name)})
    with Database(tmp_path / "all.db", write=True) as whole:
        for expected in (4, 0):
            new = 0
            for name in ("a", "b"):
                with Database(tmp_path / f"{name}.db") as part:
                    new += whole.merge(part)
            assert new == expected
        (run,) = whole.runs()
        found = {(r.case.model, r.attempt, r.outcome.status.value) for r in whole.results(run)}
    assert found == {("shared", 0, "pass"), ("shared", 1, "fail"), ("a", 0, "pass"), ("b", 0, "pass")}


@pytest.mark.parametrize(
    ("table", "column", "value", "why"),
    [
        ("result", "outcome", "{", "not JSON"),
        ("result", "outcome", "{}", "status"),
        ("result", "outcome", b"\x00\xff", "outcome: expected text"),
        ("result", '"case"', '{"suite": 1, "model": "m"}', "suite got 1; expected str"),
        ("result", "attempt", "many", "a number got 'many'; expected one from 0"),
        ("result", "attempt", -1, "a number got -1"),
        ("run", "versions", "[]", "versions: expected an object"),
        ("run", "versions", "nonsense", "versions: not JSON"),
    ],
)
def test_a_strangers_values_are_refused(tmp_path: Path, table: str, column: str, value: object, why: str) -> None:
    path = tmp_path / "a.db"
    with Database(path, write=True) as database:
        run_with(database, {"a": outcome()})
    with sqlite3.connect(path) as connection:
        connection.execute(f"UPDATE {table} SET {column} = ?", (value,))
    connection.close()
    with Database(path) as database, pytest.raises(SuiteError) as caught:
        list(map(database.results, database.runs()))
    assert str(path) in str(caught.value)
    assert why in str(caught.value)


def test_other_files_are_no_databases(tmp_path: Path) -> None:
    text, other, views = tmp_path / "text.db", tmp_path / "other.db", tmp_path / "views.db"
    text.write_text("hello")
    with sqlite3.connect(other) as connection:
        connection.execute("CREATE TABLE run (id)")
    connection.close()
    Database(views, write=True).close()
    with sqlite3.connect(views) as connection:
        connection.execute("CREATE VIEW endless AS SELECT 1")
    connection.close()
    for path in (text, other, views, tmp_path):
        for write in (False, True):
            with pytest.raises(SuiteError, match="not a database of sweeps"):
                Database(path, write=write)
    assert text.read_text() == "hello"
    with pytest.raises(SuiteError, match="no such database"):
        Database(tmp_path / "none.db")


def test_a_later_version_is_told(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    Database(path, write=True).close()
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 9")
    connection.close()
    with pytest.raises(SuiteError, match="of version 9; this checked_backend reads version 2"):
        Database(path)


def test_what_cannot_be_written_is_told(tmp_path: Path) -> None:
    with Database(tmp_path / "a.db", write=True) as database:
        run = run_with(database, {"a": outcome()})
        database._connection.execute("PRAGMA query_only = ON")
        with pytest.raises(SuiteError, match=r"a\.db: cannot be written: .*readonly.*What is in it stays"):
            database.add(run, Attempt(Case("s", "m"), 0, "", "s", outcome()))
