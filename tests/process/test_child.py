"""A program that goes on in a child, and what becomes of the two."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from checked_backend.process.child import Limits, Noticeboard, confined

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="a process cannot ask to die with another one")


LIMITS = Limits(60, None)


def program(what: str, limits: str = "60, None") -> list[str]:
    """A program whose child does something; the parent prints how the child ended."""
    text = f"""
import os, signal, sys, time
from checked_backend.process.child import Limits, confined

def work(board):
    board.note("working")
    print(os.getpid(), flush=True)
    {what}
    return 5

ended = confined(work, Limits({limits}))
print("child ended with", ended.exit, ended.overdue, ended.stage, flush=True)
"""
    return [sys.executable, "-c", text]


@pytest.mark.process
@pytest.mark.parametrize(
    ("what", "status"), [("pass", 5), ("os.kill(os.getpid(), signal.SIGKILL)", -9), ("os._exit(0)", 0)]
)
def test_the_parent_learns_how_the_child_ended(what: str, status: int) -> None:
    done = subprocess.run(program(what), capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[1:] == [f"child ended with {status} None working"]


@pytest.mark.process
def test_signals_reach_the_child() -> None:
    waits = "signal.signal(signal.SIGTERM, lambda *_: os._exit(7)); time.sleep(600)"
    with subprocess.Popen(program(waits), stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        running.stdout.readline()
        time.sleep(0.3)
        running.send_signal(signal.SIGTERM)
        assert running.stdout.read() == "child ended with 7 None working\n"


@pytest.mark.process
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


@pytest.mark.process
def test_a_child_that_takes_too_long_is_ended_with_what_it_started() -> None:
    waits = "import subprocess; subprocess.Popen(['sleep', '600']); time.sleep(600)"
    began = time.monotonic()
    done = subprocess.run(program(waits, "1, None"), capture_output=True, text=True, check=True)  # sleep holds the pipe
    assert time.monotonic() - began < 60
    assert done.stdout.splitlines()[1:] == ["child ended with -9 1.0 working"]


@pytest.mark.process
def test_a_stage_may_have_less_time() -> None:
    def work(board: Noticeboard) -> int:
        board.note("a stage", 0.2)
        time.sleep(600)
        return 0

    ended = confined(work, LIMITS)
    assert (ended.exit, ended.stage, ended.overdue) == (-9, "a stage", 0.2)
    assert ended.words == "had not ended after 0.2 s"


@pytest.mark.process
def test_memory_has_a_limit() -> None:
    takes = "\n    try:\n        x = bytearray(2**31)\n    except MemoryError:\n        os._exit(9)"
    done = subprocess.run(program(takes, "60, 2**30"), capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[1:] == ["child ended with 9 None working"]


@pytest.mark.process
def test_a_process_that_is_limited_itself_can_confine() -> None:
    limited = "\n    import resource\n    resource.setrlimit(resource.RLIMIT_DATA, (2**32, 2**32))\n    "
    nested = "e = confined(lambda _: 5, Limits(60, 2**40))\n    return e.exit"
    done = subprocess.run(program(limited + nested, "60, None"), capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[1:] == ["child ended with 5 None working"]


@pytest.mark.process
def test_a_child_of_a_process_that_collects_output_is_collected_too(capsys: pytest.CaptureFixture[str]) -> None:
    def work(_board: Noticeboard) -> int:
        print("out")
        print("err", file=sys.stderr)
        return 3

    ended = confined(work, LIMITS)
    assert ended.exit == 3
    assert capsys.readouterr() == ("out\n", "err\n")


@pytest.mark.process
def test_an_exception_does_not_come_back_into_the_parents_code() -> None:
    def work(_board: Noticeboard) -> int:
        raise RuntimeError("oops")

    assert confined(work, LIMITS).exit == 70
