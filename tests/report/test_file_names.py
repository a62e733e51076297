"""Names of files that nobody else takes."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from pathlib import Path

import pytest
import torch

from checked_backend.report.file_names import claimed_path, process_rank, this_moment

MOMENT = datetime(2026, 1, 2, 3, 4, 5, tzinfo=timezone.utc)


def test_the_process_is_in_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert this_moment(MOMENT) == f"20260102T030405Z-{os.getpid()}"


def test_two_ranks_in_the_same_second_have_other_names(monkeypatch: pytest.MonkeyPatch) -> None:
    names = set()
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        names.add(this_moment(MOMENT))
    assert names == {f"20260102T030405Z-rank{rank}-{os.getpid()}" for rank in (0, 1)}


def test_the_process_group_knows_better_than_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 3)
    assert process_rank() == 3


@pytest.mark.parametrize("rank", ["", "-1", "one", "../1", "1" * 50])
def test_what_is_no_rank_is_none(rank: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", rank)
    assert process_rank() is None


def test_threads_in_the_same_second_get_their_own_names(tmp_path: Path) -> None:
    def write(number: int) -> Path:
        with claimed_path(tmp_path, "repro_relu", ".py") as path:
            assert not path.exists()
            path.write_text(str(number))
            return path

    with ThreadPoolExecutor(8) as pool:
        paths = list(pool.map(write, range(40)))
    assert len(set(paths)) == 40
    assert sorted(int(path.read_text()) for path in paths) == list(range(40))
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in paths}  # no claim is left


def test_a_claim_of_a_process_that_was_killed_costs_a_number(tmp_path: Path) -> None:
    (tmp_path / ".x.py.claim").write_text("")
    with claimed_path(tmp_path, "x", ".py") as path:
        assert path.name == "x_1.py"


def test_a_claim_is_given_back_when_the_writer_raises(tmp_path: Path) -> None:
    with pytest.raises(FileExistsError), claimed_path(tmp_path, "x", ".py"):
        raise FileExistsError
    assert not list(tmp_path.iterdir())
