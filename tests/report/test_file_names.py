"""Names of files that no other process takes."""

from __future__ import annotations

import os
from datetime import datetime, timezone
from pathlib import Path

import pytest
import torch

from checked_backend.report.file_names import free_path, process_rank, this_moment

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


def test_a_name_that_is_taken_gets_a_number(tmp_path: Path) -> None:
    names = []
    for _ in range(3):
        path = free_path(tmp_path, "repro_relu", ".py")
        path.touch()
        names.append(path.name)
    assert names == ["repro_relu.py", "repro_relu_1.py", "repro_relu_2.py"]
