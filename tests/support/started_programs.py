"""Programs that tests start in processes of their own."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

import checked_backend

PACKAGE = Path(checked_backend.__file__).parent
VERB = (sys.executable, "-m", "checked_backend", "run", "--no-localize")


def needs(*modules: str) -> None:
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} is not installed")


def started(
    words: tuple[object, ...], folder: Path, more: Mapping[str, str] | None = None, *, stdin: int | None = None
) -> subprocess.Popen[str]:
    """Start a program in a folder, with no option of the checks in its environment but those given."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("CHECKED_B")}
    environment["PYTHONPATH"] = os.pathsep.join([str(PACKAGE.parent), environment.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [str(word) for word in words],
        cwd=folder,
        env={**environment, "OMP_NUM_THREADS": "1", **(more or {})},
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finished(
    words: tuple[object, ...], folder: Path, more: Mapping[str, str] | None = None, *, reads: str | None = None
) -> tuple[int, str, str]:
    """Run a program to its end: its exit code, what it printed to stdout, and to stderr.

    It reads the text from its stdin, if there is one.
    """
    process = started(words, folder, more, stdin=None if reads is None else subprocess.PIPE)
    out, err = process.communicate(reads, timeout=300)
    return process.returncode, out, err
