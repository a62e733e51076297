"""Ctrl-C is not lost, and SIGTERM is the same where that is asked for."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from checked_backend.process.interrupt import Interruption, terminable


def test_what_was_swallowed_is_raised_at_the_next_check() -> None:
    before = signal.getsignal(signal.SIGINT)
    stop = Interruption()
    stop.check()
    with stop.awaited(600):
        with pytest.raises(KeyboardInterrupt):  # where it may be swallowed
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            stop.check()
        stop.heard()
        stop.check()
    assert signal.getsignal(signal.SIGINT) is before


def test_the_time_is_up_once() -> None:
    before = signal.getsignal(signal.SIGINT)
    stop = Interruption()
    with stop.awaited(0.05):
        with pytest.raises(KeyboardInterrupt):
            time.sleep(60)
        with pytest.raises(KeyboardInterrupt):
            stop.check()
        stop.heard()
        time.sleep(0.1)
        stop.check()
    assert stop.why == "at its deadline, after 0.05 s"
    assert signal.getsignal(signal.SIGINT) is before
    with Interruption().awaited(0.05):
        pass
    time.sleep(0.1)  # nothing comes after the end


def test_other_threads_cannot_listen_and_are_told_by_a_check_that_the_time_is_up() -> None:
    done: list[str] = []

    def run() -> None:
        stop = Interruption()
        with stop.awaited(0.05), terminable():
            time.sleep(0.1)
            with pytest.raises(KeyboardInterrupt):
                stop.check()
        done.append("checked")

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert done == ["checked"]


def test_sigterm_is_ctrl_c_for_a_block() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), terminable():
        os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_handler_that_python_could_not_put_back_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signal, "getsignal", lambda _number: None)
    monkeypatch.setattr(signal, "signal", lambda *_given: pytest.fail("a handler was replaced"))
    with terminable(), Interruption().awaited(600):
        pass
