"""Paths as people read them."""

from __future__ import annotations

from pathlib import Path

import pytest

from checked_backend.findings.paths import shown_path


def test_a_path_is_shown_from_where_people_look(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    work = tmp_path / "a" / "b"
    work.mkdir(parents=True)
    monkeypatch.chdir(work)
    assert shown_path(str(work / "src" / "model.py")) == "src/model.py"
    assert shown_path(str(tmp_path / "a" / "model.py")) == "../model.py"
    assert shown_path(str(tmp_path / "model.py")) == str(tmp_path / "model.py")  # far from here
    assert (
        shown_path("/usr/lib/python3/site-packages/transformers/models/bert.py")
        == "site-packages/transformers/models/bert.py"
    )
    assert shown_path("<string>") == "<string>"
    work.rmdir()
    assert shown_path("/home/me/model.py") == "/home/me/model.py"  # there is no working directory
