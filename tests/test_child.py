"""A program that goes on in a child, and what becomes of the two."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from checked_backend.child import in_child

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="a process cannot ask to die with another one")


def program(what: str) -> list[str]:
    """A program whose child does something; the parent prints how the child ended."""
    text = f"""
import os, signal, sys, time
from checked_backend.child import in_child
status = in_child()
if status is None:
    print(os.getpid(), flush=True)
    {what}
print("child ended with", status, flush=True)
"""
    return [sys.executable, "-c", text]


@pytest.mark.parametrize(
    ("what", "status"), [("sys.exit(5)", 5), ("os.kill(os.getpid(), signal.SIGKILL)", -9), ("os._exit(0)", 0)]
)
def test_the_parent_learns_how_the_child_ended(what: str, status: int) -> None:
    done = subprocess.run(program(what), capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[1:] == [f"child ended with {status}"]


def test_signals_reach_the_child() -> None:
    waits = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(7)); time.sleep(600)"
    with subprocess.Popen(program(waits), stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        running.stdout.readline()
        time.sleep(0.3)
        running.send_signal(signal.SIGTERM)
        assert running.stdout.read() == "child ended with 7\n"


def test_the_child_goes_with_the_parent() -> None:
    with subprocess.Popen(program("time.sleep(600)"), stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        child = Path(f"/proc/{running.stdout.readline().strip()}")
        assert child.exists()
        running.kill()
        deadline = time.monotonic() + 30
        while child.exists() and time.monotonic() < deadline:
            if "State:\tZ" in (child / "status").read_text(encoding="utf-8"):
                break  # dead, and nobody has asked how
            time.sleep(0.05)
        else:
            assert not child.exists()


def test_where_torch_is_loaded_nothing_is_forked() -> None:
    assert in_child() is None  # pytest goes on here
