from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from checked_backend.dump.region import claim_slot
from checked_backend.errors import DumpError


def test_indices_are_never_shared(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        slots = list(pool.map(lambda _: claim_slot(tmp_path, "net"), range(32)))
    assert sorted(slot.index for slot in slots) == list(range(32))


def test_numbering_goes_on_after_folders_that_are_there(tmp_path: Path) -> None:
    (tmp_path / "net" / "net_backward_6").mkdir(parents=True)
    (tmp_path / "net" / "net_backward_x").mkdir()
    assert claim_slot(tmp_path, "net").index == 7
    assert claim_slot(tmp_path, "net").index == 8


def test_names_become_file_names(tmp_path: Path) -> None:
    assert claim_slot(tmp_path, "../a b/<lambda>").path("joint") == tmp_path / "a_b_lambda" / "a_b_lambda_joint_0"
    assert claim_slot(tmp_path, "<>").name == "graph"


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    slot = claim_slot(tmp_path, "net")

    def fail(folder: Path) -> None:
        (folder / "half").write_text("")
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        slot.write("forward", fail)
    assert [path.name for path in slot.folder.iterdir()] == [".claims"]


def test_a_folder_is_never_overwritten(tmp_path: Path) -> None:
    slot = claim_slot(tmp_path, "net")
    target = slot.write("forward", lambda folder: (folder / "module.py").write_text("1") and None)
    assert target == tmp_path / "net" / "net_forward_0"
    with pytest.raises(DumpError, match="cannot write the dump"):
        slot.write("forward", lambda folder: (folder / "module.py").write_text("2") and None)
    assert (target / "module.py").read_text() == "1"
