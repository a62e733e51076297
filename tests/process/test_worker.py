"""Workers: their answer, their errors, their deaths."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from checked_backend._torch.caches import without_compile_caches
from checked_backend._torch.generated_modules import GeneratedModule, generated_modules_noted
from checked_backend.errors import CheckedBackendError
from checked_backend.process.job import JobEnd
from checked_backend.process.worker import cannot_differentiate_in_worker, run_in_worker

pytestmark = pytest.mark.process


def test_the_answer_comes_back_whole() -> None:
    text = "ä" * 1_000_000
    assert run_in_worker(lambda: text, timeout=60) == text
    assert run_in_worker(str, timeout=60) == ""  # no answer is another thing


def test_what_a_worker_changes_is_lost() -> None:
    threads = torch.get_num_threads()
    changed: list[int] = []
    assert run_in_worker(lambda: str(changed.append(1)), timeout=60) == "None"
    assert changed == []
    assert torch.get_num_threads() == threads


def test_an_exception_is_raised_here() -> None:
    def fails() -> str:
        raise ValueError("no such thing")

    with pytest.raises(CheckedBackendError, match="ValueError: no such thing"):
        run_in_worker(fails, timeout=60)


@pytest.mark.inductor
def test_inductor_generates_the_same_code_in_a_worker() -> None:
    def text() -> str:
        modules: list[GeneratedModule] = []
        torch._dynamo.reset()
        with generated_modules_noted(modules), without_compile_caches():
            torch.compile(lambda x: x.sin() + 1)(torch.randn(512, 512))
        return modules[0].text.partition("\n")[2]  # the first line counts the graphs

    assert run_in_worker(text, timeout=60) == text()


@pytest.mark.parametrize(
    ("end", "detail", "cause"),
    [
        (lambda: str(os.kill(os.getpid(), signal.SIGSEGV)), "crash.signal", "killed by SIGSEGV"),
        (lambda: str(os.kill(os.getpid(), signal.SIGKILL)), "crash.memory", "killed by SIGKILL (out of memory?)"),
        (lambda: os._exit(7), "crash.exit", "exited with status 7"),
    ],
)
def test_a_death(end: Callable[[], str], detail: str, cause: str) -> None:
    died = run_in_worker(end, timeout=60)
    assert isinstance(died, JobEnd)
    assert (died.detail, died.cause) == (detail, cause)


def test_autograd_works_in_a_worker_or_the_reason_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    (torch.ones(2, requires_grad=True) * 2).sum().backward()
    told = cannot_differentiate_in_worker()
    assert told is None or "Autograd-and-Fork" in told  # builds for an accelerator refuse it

    def refusing(*_args: object, **_kwargs: object) -> object:
        raise RuntimeError("Unable to handle autograd's threading in combination with fork-based multiprocessing.")

    monkeypatch.setattr(torch.autograd, "grad", refusing)
    assert "Unable to handle autograd's threading" in str(cannot_differentiate_in_worker())


def test_a_hang_is_killed() -> None:
    def sleeps() -> str:
        time.sleep(600)
        return ""

    died = run_in_worker(sleeps, timeout=0.5)
    assert isinstance(died, JobEnd)
    assert (died.detail, died.cause) == ("crash.hang", "still running after 0.5 s")
    assert re.match(r"\S*test_worker.py:\d+ in sleeps, called at \S*worker.py:\d+ in work, ", died.where)


def test_a_worker_has_workers() -> None:
    assert run_in_worker(lambda: f"outer {run_in_worker(lambda: 'inner', timeout=60)}", timeout=60) == "outer inner"


def interrupt_soon() -> None:
    """Ctrl-C in a second, in the thread that waits."""
    main = threading.main_thread().ident
    assert main is not None
    threading.Timer(1.0, signal.pthread_kill, [main, signal.SIGINT]).start()


def test_an_interrupted_worker_may_answer() -> None:
    def patient() -> str:
        try:
            time.sleep(600)
        except KeyboardInterrupt:
            return "the best so far"
        return "never"

    interrupt_soon()
    assert run_in_worker(patient, timeout=60, patience=30) == "the best so far"


def test_a_worker_that_heeds_no_signal_is_killed() -> None:
    def deaf() -> str:
        for number in (signal.SIGINT, signal.SIGABRT):
            signal.signal(number, signal.SIG_IGN)
        time.sleep(600)
        return "never"

    interrupt_soon()
    died = run_in_worker(deaf, timeout=60, patience=0.5)
    assert isinstance(died, JobEnd)
    assert (died.detail, died.cause, died.where) == ("crash.hang", "still running after 0.5 s", "")


@pytest.mark.skipif(sys.platform != "linux", reason="a process cannot ask to die with another one")
def test_a_worker_does_not_outlive_who_waits_for_it() -> None:
    def outer() -> str:
        def inner() -> str:
            os.write(told, str(os.getpid()).encode())
            return str(time.sleep(600))

        return str(run_in_worker(inner, timeout=600))

    listening, told = os.pipe()
    died = run_in_worker(outer, timeout=3)  # it is killed, and its worker is in another group
    assert isinstance(died, JobEnd)
    inner = Path(f"/proc/{os.read(listening, 20).decode()}")
    deadline = time.monotonic() + 30
    while inner.exists() and "State:\tZ" not in (inner / "status").read_text() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not inner.exists() or "State:\tZ" in (inner / "status").read_text()
    os.close(listening)
    os.close(told)


def test_without_patience_ctrl_c_ends_it() -> None:
    interrupt_soon()
    with pytest.raises(KeyboardInterrupt):
        run_in_worker(lambda: str(time.sleep(600)), timeout=60)
