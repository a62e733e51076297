"""Run a function in a process of its own: compiled code can kill or hang the process that runs it."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch

from checked_backend._torch.inductor import generate_code_for, renew_compile_threads
from checked_backend.errors import CheckedBackendError
from checked_backend.process.child import die_with

__all__ = ["Death", "NoWorkerError", "cannot_differentiate_in_worker", "cannot_fork", "how_it_died", "run_in_worker"]

_DONE, _FAILED = "done:", "failed:"
_HANG = "crash.hang"


class NoWorkerError(CheckedBackendError):
    """Raised if the system gives no process: there are too many, or there is too little memory."""


@dataclass(frozen=True, slots=True)
class Death:
    """How a worker died.

    Attributes:
        detail: Finer kind of a finding: ``crash.signal``, ``crash.memory``, ``crash.exit`` or ``crash.hang``.
        words: How the worker died, for people.
    """

    detail: str
    words: str

    @property
    def hung(self) -> bool:
        """Whether the worker had not ended when its time was up."""
        return self.detail == _HANG


def cannot_fork() -> str | None:
    """The reason why no worker can be made here; None if one can."""
    if "fork" not in multiprocessing.get_all_start_methods():
        return "this operating system cannot fork processes"
    if torch.cuda.is_initialized():
        return "a process that has used CUDA cannot be forked"
    return None


def cannot_differentiate_in_worker() -> str | None:
    """The reason why autograd does not work in a worker made now; None if it does.

    Once a backward pass has started autograd's threads, autograd refuses to run in a forked process
    (``torch/csrc/autograd/engine.cpp``). Builds of torch for an accelerator start them even without an accelerator.
    """
    try:
        tried = run_in_worker(_differentiated, timeout=60)
    except CheckedBackendError as error:
        return str(error)
    return tried.words if isinstance(tried, Death) else None


def _differentiated() -> str:
    with torch.enable_grad(), torch.inference_mode(mode=False):
        x = torch.ones((), requires_grad=True)
        return str(torch.autograd.grad(x * x, x))


def run_in_worker(produce: Callable[[], str], *, timeout: float, patience: float = 0.0) -> str | Death:
    """Run a function in a forked worker process, which inherits everything it needs.

    It runs torch on one thread: OpenMP's do not survive a fork. Inductor generates code for as many as here, if that is
    one for each CPU, so kernels are compiled once. It leads a process group of its own, killed with it, because
    compilers start processes. On Linux it does not outlive the process that waits for it.

    Args:
        produce: Returns text. Anything it changes is lost with the worker.
        timeout: Seconds after which the worker counts as hung and is killed.
        patience: On Ctrl-C the worker is interrupted too, and has this many seconds to answer with what it has. If this
            is 0, the worker is killed, and this function raises.

    Returns:
        The text, or how the worker died.

    Raises:
        NoWorkerError: The system gives no process.
        CheckedBackendError: No process can be forked here, or the function raised.
        KeyboardInterrupt: On Ctrl-C, if no patience is asked for, and on a second one.
    """
    why = cannot_fork()
    if why is not None:
        raise CheckedBackendError(f"no worker process: {why}.")
    context = multiprocessing.get_context("fork")
    try:
        receiver, sender = context.Pipe(duplex=False)
    except OSError as error:
        raise NoWorkerError(f"no worker process: {error}.") from error
    worker = context.Process(
        target=_work, args=(produce, sender, os.getpid())
    )  # not daemonic: a worker may have workers
    with warnings.catch_warnings():
        # Python 3.12 warns of forking a process with threads; the worker starts none of its own and uses none of these
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            worker.start()
        except OSError as error:
            receiver.close()
            sender.close()
            raise NoWorkerError(f"no worker process: {error}.") from error
    sender.close()
    text, why = "", "killed by Ctrl-C"
    try:
        why = _waited(receiver, worker.pid, timeout, patience)
        if not why:
            with contextlib.suppress(EOFError):  # the worker died before it could send
                text = receiver.recv_bytes().decode()
    finally:
        if why or text:
            _kill(worker.pid)  # also after an answer: processes that the worker started must not outlive it
        worker.join()
        receiver.close()
    if text.startswith(_FAILED):
        raise CheckedBackendError(f"failed in a worker process: {text.removeprefix(_FAILED)}")
    if text:
        return text.removeprefix(_DONE)
    if why:
        return Death(_HANG, why)
    return how_it_died(worker.exitcode or 0)


def _waited(receiver: Connection, pid: int | None, timeout: float, patience: float) -> str:
    """Wait for an answer, or for the end of the worker. Return "", or the reason for waiting no longer."""
    try:
        return "" if receiver.poll(timeout) else f"still running after {timeout:g} s"
    except KeyboardInterrupt:
        if not patience or pid is None:
            raise
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGINT)
        return "" if receiver.poll(patience) else f"still running {patience:g} s after Ctrl-C"


def _kill(pid: int | None) -> None:
    if pid is None:
        return
    for kill in (os.killpg, os.kill):  # the group does not exist yet if the worker was slow to start
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


def _work(produce: Callable[[], str], sender: Connection, parent: int) -> None:
    _drop_signal_handlers()
    os.setpgid(0, 0)
    die_with(parent)
    if torch.get_num_threads() == os.cpu_count():  # else code asks for the threads by their number, and waits for ever
        generate_code_for(torch.get_num_threads())
    torch.set_num_threads(1)
    try:
        renew_compile_threads()
        text = _DONE + produce()
    except (Exception, KeyboardInterrupt) as error:  # told to the parent, which raises it
        text = f"{_FAILED}{type(error).__name__}: {error}"
    sender.send_bytes(text.encode())
    sender.close()


def _drop_signal_handlers() -> None:
    """Remove the user's signal handlers: this process must not save the program's state or wake its event loop."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def how_it_died(exit_code: int) -> Death:
    """How a process died, from its exit code, which is negative for a signal."""
    if exit_code >= 0:
        return Death("crash.exit", f"exited with status {exit_code}")
    name = signal.Signals(-exit_code).name
    if name == "SIGKILL":
        return Death("crash.memory", "killed by SIGKILL (out of memory?)")
    return Death("crash.signal", f"killed by {name}")
