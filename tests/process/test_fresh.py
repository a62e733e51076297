"""A function that is called in a Python of its own."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from checked_backend.process.fresh import call_in_fresh_interpreter

MODULE = """
import os, signal, sys

def echo(words):
    print("to stdout:", words)
    print("torch" in sys.modules, file=sys.stderr)
    sys.exit(len(words))

def die(words):
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module that only the path of this process leads to."""
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "of_a_fresh_python.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    return "of_a_fresh_python"


@pytest.mark.process
def test_it_gets_the_words_and_prints_here(module: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call_in_fresh_interpreter(module, "echo", ["a b", "--ü"]) == 2
    assert capsys.readouterr() == ("to stdout: ['a b', '--ü']\n", "False\n")


@pytest.mark.process
@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_its_death_is_told(module: str) -> None:
    assert call_in_fresh_interpreter(module, "die", []) == -signal.SIGKILL


@pytest.mark.process
def test_nothing_is_imported_from_the_working_directory(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "of a stranger"
    folder.mkdir()
    for name in ("json", "importlib", "signal", "checked_backend"):
        (folder / f"{name}.py").write_text("print('run')")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", os.curdir)])
    assert call_in_fresh_interpreter(module, "echo", []) == 0
    assert "run" not in capsys.readouterr().out
