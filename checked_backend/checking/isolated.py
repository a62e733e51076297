"""Run a check in a process of its own, because compiled code can kill the process that runs it."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection

import torch

from checked_backend.errors import CheckedBackendError
from checked_backend.record import Coverage, Finding, Kind
from checked_backend.report import Report
from checked_backend.report.environment import environment

__all__ = ["run_isolated"]

_DONE, _FAILED = "done:", "failed:"


def run_isolated(make_report: Callable[[], Report], run_eager: Callable[[], object], *, timeout: float) -> Report:
    """Make a report in a forked worker process.

    The program need not be picklable: the worker inherits it. The worker runs on one thread, because OpenMP's threads
    do not survive a fork. If it dies, a second worker runs the program in eager alone, to know which side kills it.

    Args:
        make_report: Runs the check.
        run_eager: Runs the program in eager.
        timeout: Seconds after which a worker counts as hung.

    Returns:
        The worker's report, or one with a finding of kind ``crash`` if it died or hung (``unsupported`` if eager does
        too).

    Raises:
        CheckedBackendError: Processes cannot be forked here (no ``fork``, or CUDA is already in use), or the check
            itself raised in the worker.
    """
    if "fork" not in multiprocessing.get_all_start_methods():
        raise CheckedBackendError("isolate=True needs an operating system that can fork processes.")
    if torch.cuda.is_initialized():
        raise CheckedBackendError("isolate=True cannot fork a process that has used CUDA. Call it before CUDA is used.")
    text, death = _in_worker(lambda: make_report().to_json(), timeout)
    if text is not None:
        return Report.from_json(text)
    _, eager_death = _in_worker(lambda: str(run_eager() is None), timeout)
    return _crash_report(death, eager_death)


def _in_worker(produce: Callable[[], str], timeout: float) -> tuple[str | None, tuple[str, str]]:
    """Run a function in a worker. Returns its text, or None and how the worker died: a finer kind, and words."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    worker = context.Process(target=_work, args=(produce, sender), daemon=True)
    with warnings.catch_warnings():
        # Python 3.12 warns of forking a process with threads; the worker starts none of its own and uses none of these
        warnings.simplefilter("ignore", DeprecationWarning)
        worker.start()
    sender.close()
    text, hung = "", True
    try:
        hung = not receiver.poll(timeout)
        if not hung:
            with contextlib.suppress(EOFError):  # it died before it could send
                text = receiver.recv_bytes().decode()
    finally:
        if hung:
            worker.kill()
        worker.join()
        receiver.close()
    if text.startswith(_FAILED):
        raise CheckedBackendError(f"the check failed in its worker process: {text.removeprefix(_FAILED)}")
    if text:
        return text.removeprefix(_DONE), ("", "")
    return None, ("crash.hang", f"still running after {timeout:g} s") if hung else _how_it_died(worker.exitcode or 0)


def _work(produce: Callable[[], str], sender: Connection) -> None:
    torch.set_num_threads(1)
    try:
        text = _DONE + produce()
    except Exception as error:  # told to the parent, which raises it
        text = f"{_FAILED}{type(error).__name__}: {error}"
    sender.send_bytes(text.encode())
    sender.close()


def _how_it_died(exit_code: int) -> tuple[str, str]:
    if exit_code >= 0:
        return "crash.exit", f"exited with status {exit_code}"
    name = signal.Signals(-exit_code).name
    if name == "SIGKILL":
        return "crash.memory", "killed by SIGKILL (out of memory?)"
    return "crash.signal", f"killed by {name}"


def _crash_report(death: tuple[str, str], eager_death: tuple[str, str]) -> Report:
    eager_dies = bool(eager_death[0])
    finding = Finding(
        kind=Kind.UNSUPPORTED if eager_dies else Kind.CRASH,
        detail="unsupported" if eager_dies else death[0],
        subject="candidate",
        message=(
            "the process died, and so does one that runs the program in eager alone"
            if eager_dies
            else "the process that compiled and ran the program died; one that runs it in eager alone does not"
        ),
        expected=eager_death[1] or "no death",
        actual=death[1],
    )
    return Report((finding,), Coverage(checked={"program runs": 1}), title="check", environment=environment())
