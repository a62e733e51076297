"""The page that explains the tree names files that are there, and every room is on it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import checked_backend

PACKAGE = Path(checked_backend.__file__).parent
PAGE = (PACKAGE / "ARCHITECTURE.md").read_text(encoding="utf-8")
QUOTED = sorted(set(re.findall(r"`([\w./]+)`", PAGE)))
PATHS = [name for name in QUOTED if "/" in name or name.endswith((".py", ".toml"))]


def test_the_page_names_files() -> None:
    assert len(PATHS) > 30


@pytest.mark.parametrize("name", PATHS)
def test_every_path_on_the_page_exists(name: str) -> None:
    root = PACKAGE.parent if name.startswith("tests/") or name == "pyproject.toml" else PACKAGE
    if not root.joinpath("tests").is_dir() and root != PACKAGE:
        pytest.skip("installed without its tests")
    path = root / name
    assert path.is_dir() if name.endswith("/") else path.is_file()


@pytest.mark.parametrize("room", sorted(path.name for path in PACKAGE.iterdir() if (path / "__init__.py").is_file()))
def test_every_room_is_on_the_page(room: str) -> None:
    assert f"`{room}/" in PAGE or f"`{room}`" in PAGE


@pytest.mark.parametrize("name", ["CheckedRegion", "Finding", "Kind"])
def test_every_class_on_the_page_is_in_the_file_it_is_said_to_be_in(name: str) -> None:
    homes = {"CheckedRegion": "regions/region.py", "Finding": "findings/finding.py", "Kind": "findings/kinds.py"}
    assert f"class {name}" in (PACKAGE / homes[name]).read_text(encoding="utf-8")
