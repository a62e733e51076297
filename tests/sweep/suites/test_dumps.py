"""Dumped graphs as a suite."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from checked_backend.errors import SuiteError
from checked_backend.runs.case import Case
from checked_backend.sweep.rules import Settings
from checked_backend.sweep.suites.dumps import Dumps
from tests.support.dump_tools import dumping
from tests.support.sweep_tools import examined


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    dumping(lambda x: (x.sin() @ x).relu(), tmp_path / "dumps", values=False)(torch.randn(4, 4))
    return tmp_path / "dumps"


def test_every_dumped_graph_is_a_case_and_passes(folder: Path) -> None:
    models = Dumps(str(folder)).models()
    assert models
    assert all(model.fixed for model in models)
    found = examined(f"dumps:{folder}", models[0].name, mode="as dumped", dtype="as dumped")
    assert found.status.value == "pass", found.message


def test_the_fingerprint_changes_with_a_graph(folder: Path) -> None:
    suite = Dumps(str(folder))
    before = suite.fingerprint()
    assert before == Dumps(str(folder)).fingerprint()
    graph = next(folder.rglob("graph.json"))
    graph.write_text(graph.read_text() + " ")
    assert suite.fingerprint() != before


def test_no_path_leaves_the_folder_and_a_folder_without_dumps_is_told(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(SuiteError, match="is not in"):
        Dumps(str(folder)).build(Case("dumps:x", "../../elsewhere"), Settings())
    (tmp_path / "empty").mkdir()
    with pytest.raises(SuiteError, match=r"no dumped graph in it; expected folders with a graph\.json each"):
        Dumps(str(tmp_path / "empty")).models()


def test_a_broken_dump_is_no_pass(folder: Path) -> None:
    graph = next(folder.rglob("graph.json"))
    graph.write_text("{}")
    found = examined(f"dumps:{folder}", graph.parent.relative_to(folder).as_posix())
    assert found.status.value == "error"
    assert "DumpError" in found.message


def test_a_compiler_of_a_file_checks_a_dump(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("def off(gm, _):\n    return lambda *args: [r * 1.05 for r in gm(*args)]\n")
    way = {"mode": "as dumped", "dtype": "as dumped", "compiler": f"{path}:off"}
    for settings, status in ((None, "fail"), (Settings(batch_size=3), "unsupported")):
        assert examined(f"dumps:{folder}", Dumps(str(folder)).models()[0].name, settings, **way).status.value == status
