"""A script shows a bug if it ends as the bug makes it end."""

from __future__ import annotations

from pathlib import Path

import pytest

from checked_backend.fuzz.worker import _shows

KILLED = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"


@pytest.mark.parametrize(
    ("script", "detail", "shows"),
    [
        ("raise SystemExit(1)", "logic", True),
        ("raise SystemExit(0)", "logic", False),
        ("raise SystemExit(2)", "logic", False),
        (KILLED, "crash.signal", True),
        (KILLED, "logic", False),
        ("raise SystemExit(1)", "crash.signal", False),
        ("raise SystemExit(7)", "crash.exit", True),
        ("raise SystemExit(1)", "crash.exit", False),
        ("import time; time.sleep(60)", "crash.hang", True),
        ("import time; time.sleep(60)", "logic", False),
        ("1 +", "logic", False),
    ],
)
def test_a_script_shows_the_bug_that_it_is_of(tmp_path: Path, script: str, detail: str, shows: bool) -> None:
    path = tmp_path / "repro.py"
    path.write_text(script)
    assert _shows(path, 3.0, detail) is shows


def test_a_script_that_checks_must_say_so(tmp_path: Path) -> None:
    path = tmp_path / "repro.py"
    path.write_text("print('FAIL: x'); raise SystemExit(1)")
    assert _shows(path, 20.0, "logic", "FAIL: ")
    path.write_text("raise SystemExit(1)")
    assert not _shows(path, 20.0, "logic", "FAIL: ")
