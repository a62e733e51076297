"""The lines at the end of a pytest run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pytest_plugin.test_plugin import run


@pytest.mark.process
def test_folders_with_conftests_of_their_own_are_no_hindrance(tmp_path: Path) -> None:
    """Where a plugin does not apply to a folder, pytest takes it out of a set of all plugins."""
    files = {f"{name}/conftest.py": "" for name in "ab"}
    files |= {f"{name}/test_{name}.py": f"def test_{name}():\n    pass\n" for name in "ab"}
    result = run(tmp_path, files)
    assert (result.code, result.outcomes) == (0, {"test_a": "passed", "test_b": "passed"}), result.output
