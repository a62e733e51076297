"""Runs of pytest in folders of their own, with what these tests add to pytest."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

LOADED = ("-p", "tests.support.process_marks", "-p", "tests.durations")
SETTINGS = """
[pytest]
addopts = -rA --strict-markers -m "not slow and (smoke or not (process or more))"
markers =
    slow
    process
    smoke
    more
    sampled
    inductor
    forks
"""


def run(folder: Path, source: str, *words: object) -> tuple[dict[str, set[str]], str]:
    """The names of the tests by outcome, and what was printed."""
    (folder / "pytest.ini").write_text(SETTINGS)
    (folder / "test_it.py").write_text(source)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *LOADED, *map(str, words)],
        cwd=folder,
        env={**environment, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
    )
    outcomes: dict[str, set[str]] = {}
    for outcome, name in re.findall(r"^(PASSED|FAILED|ERROR) test_it\.py::(\w+)", done.stdout, re.MULTILINE):
        outcomes.setdefault(outcome, set()).add(name)
    return outcomes, done.stdout + done.stderr
