"""The corpus keeps programs, results and groups, and refuses what is none."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from checked_backend.errors import FuzzError
from checked_backend.fuzz.database import Corpus
from checked_backend.fuzz.program import encode_program
from checked_backend.fuzz.sqlite_file import FUZZ, is_database
from tests.support.fuzz_tools import PASS, failing, filled, group_of, program_of


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "f.db"


def test_what_was_written_is_there_again(path: Path) -> None:
    with Corpus(path, write=True) as corpus:
        filled(corpus, [program_of("torch.exp"), program_of("torch.neg"), program_of("torch.abs")])
        entries = corpus.waiting()
        corpus.add_result(entries[0].number, PASS)
        corpus.add_result(entries[1].number, failing())
        corpus.put(group_of("torch.neg"))
    with Corpus(path) as corpus:
        assert [entry.name for entry in corpus.waiting()] == ["seed 0, program 2"]
        assert [entry.program for entry, _ in corpus.failures()] == [program_of("torch.neg")]
        assert corpus.next_number(0) == 3
        assert corpus.next_number(1) == 0
        totals = corpus.totals()
        assert (totals.checked, totals.compiled, totals.ops, totals.pairs) == (2, 2, 2, 2)
        (group,) = corpus.groups()
        assert replace(group, number=0) == group_of("torch.neg")
    assert is_database(path, FUZZ)


def test_a_group_is_one_row_and_counts(path: Path) -> None:
    with Corpus(path, write=True) as corpus:
        first = corpus.put(group_of("torch.neg"))
        corpus.met_again(first)
        corpus.put(group_of("Tensor.neg_"))
        (group,) = corpus.groups()
        assert group.met == 3


def test_groups_whose_operator_turns_out_to_be_the_same_become_one(path: Path) -> None:
    with Corpus(path, write=True) as corpus:
        filled(corpus, [program_of("torch.exp", "torch.neg")])
        one = corpus.put(group_of("torch.neg"))
        other = corpus.put(group_of("torch.exp", "torch.neg"))
        (entry,) = corpus.waiting()
        corpus.add_result(entry.number, failing())
        corpus.assign(entry.number, other.number)
        corpus.put(replace(other, op="neg", localized=True))
        (group,) = corpus.groups()
        assert group.number == one.number
        assert group.met == 2
        assert not corpus.failures()


def test_what_was_met_while_a_group_was_localized_is_counted(path: Path) -> None:
    with Corpus(path, write=True) as corpus:
        group = corpus.put(group_of("torch.neg"))
        corpus.met_again(group)
        corpus.put(replace(group, localized=True))
        assert [one.met for one in corpus.groups()] == [2]


def test_another_compiler_is_refused(path: Path) -> None:
    with Corpus(path, write=True) as corpus:
        corpus.settle({"compiler": "inductor"})
        corpus.settle({"compiler": "inductor"})
        with pytest.raises(FuzzError, match="begun with compiler 'inductor', not 'eager'; give another --db"):
            corpus.settle({"compiler": "eager"})


def test_a_second_writer_is_refused(path: Path) -> None:
    with Corpus(path, write=True), pytest.raises(FuzzError, match="give another --db"):
        Corpus(path, write=True)


def test_what_is_no_database_of_fuzz_is_refused(path: Path) -> None:
    path.write_text("hello")
    with pytest.raises(FuzzError, match="not a database of fuzz"):
        Corpus(path)
    path.unlink()
    with pytest.raises(FuzzError, match="no such database"):
        Corpus(path)
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE run (id)")
    connection.close()
    with pytest.raises(FuzzError, match="not a database of fuzz"):
        Corpus(path)
    assert not is_database(path, FUZZ)


@pytest.mark.parametrize(
    "content",
    ["'[]'", f"'{'[' * 5000}'", *(f"json_set(content, '$.{name}', json('{{}}'))" for name in ("met", "confirmed"))],
)
def test_strange_content_is_refused(path: Path, content: str) -> None:
    with Corpus(path, write=True) as corpus:
        corpus.put(group_of("torch.neg"))
    connection = sqlite3.connect(path)
    connection.execute(f"UPDATE bug SET content = {content}")
    connection.commit()
    connection.close()
    with Corpus(path) as corpus, pytest.raises(FuzzError, match="a group"):
        corpus.groups()


@pytest.mark.parametrize(
    "calls",
    [
        [["getitem", [], {}]],
        [["setitem", [{"v": 0}], {}]],
        [["+=", [{"v": 0}], {}]],
        [["+", [{"v": 0}, 1, 2], {}]],
        [["Tensor.add", [], {}]],
    ],
)
def test_a_call_with_too_few_or_too_many_arguments_is_refused(path: Path, calls: list[Any]) -> None:
    text = json.dumps({**json.loads(encode_program(program_of("torch.neg"))), "calls": calls})
    with Corpus(path, write=True) as corpus:
        corpus.put(group_of("torch.neg"))
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE bug SET program = ?", (text,))
    with Corpus(path) as corpus, pytest.raises(FuzzError, match="a program: "):
        corpus.groups()


def test_tables_that_are_made_otherwise_are_refused(path: Path) -> None:
    """A column that is computed may be of any size; a constraint may refuse each row."""
    with Corpus(path, write=True):
        pass
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("DROP TABLE setting")
        connection.execute("CREATE TABLE setting (name TEXT, value AS (printf('%.*c', 900000000, 'x')))")
    with pytest.raises(FuzzError, match="its tables are made otherwise"):
        Corpus(path)


@pytest.mark.parametrize("status", ["", "fail", "inconclusive"])
def test_a_seed_that_is_no_number_is_refused(path: Path, status: str) -> None:
    with Corpus(path, write=True) as corpus:
        filled(corpus, [program_of("torch.exp")])
        corpus.add_result(corpus.waiting()[0].number, failing())
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE program SET seed = 'evil\n\x1b[31mPASS', status = ?", (status,))
    with Corpus(path) as corpus:
        for read in (corpus.waiting, corpus.failures, corpus.inconclusive):
            with contextlib.suppress(FuzzError):
                assert "evil" not in str(read())
        with pytest.raises(FuzzError, match="expected a whole number"):
            {"": corpus.waiting, "fail": corpus.failures, "inconclusive": corpus.inconclusive}[status]()


@pytest.mark.parametrize("met", [-5, 0, 10**400])
def test_a_count_that_is_none_is_refused(path: Path, met: int) -> None:
    with Corpus(path, write=True) as corpus:
        corpus.put(group_of("torch.exp"))
    with closing(sqlite3.connect(path)) as connection, connection:
        (text,) = connection.execute("SELECT content FROM bug").fetchone()
        connection.execute("UPDATE bug SET content = ?", (json.dumps({**json.loads(text), "met": met}),))
    with Corpus(path) as corpus, pytest.raises(FuzzError, match=r"met got .*; expected a count"):
        corpus.groups()
