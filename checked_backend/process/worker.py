"""Run a function in a fork of this process: compiled code can kill or hang the process that runs it."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

from checked_backend._torch.inductor import generate_code_for, renew_compile_threads
from checked_backend.errors import CheckedBackendError
from checked_backend.process.job import AnswerFolder, Job, JobEnd, JobResources, run

_DONE, _FAILED = "done:", "failed:"


class NoWorkerError(CheckedBackendError):
    """Raised if the system gives no process: there are too many, or there is too little memory."""


def cannot_fork() -> str | None:
    """The reason why no worker can be made here; None if one can."""
    if not hasattr(os, "fork"):
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
    return tried.cause if isinstance(tried, JobEnd) else None


def _differentiated() -> str:
    with torch.enable_grad(), torch.inference_mode(mode=False):
        x = torch.ones((), requires_grad=True)
        return str(torch.autograd.grad(x * x, x))


def run_in_worker(produce: Callable[[], str], *, timeout: float, patience: float = 0.0) -> str | JobEnd:
    """Run a function in a fork of this process, which inherits everything it needs; the text, or how the fork died.

    It runs torch on one thread: OpenMP's do not survive a fork. Inductor generates code for as many as here, if that is
    one for each CPU, so kernels are compiled once. What it prints is printed here.

    Args:
        produce: Anything it changes is lost with the worker.
        timeout: Seconds after which the worker counts as hung and is killed.
        patience: As of `checked_backend.process.job.run`.

    Raises:
        NoWorkerError: The system gives no process.
        CheckedBackendError: No process can be forked here, or the function raised.
        KeyboardInterrupt: On Ctrl-C, if no patience is asked for, and on a second one.
    """
    why = cannot_fork()
    if why is not None:
        raise CheckedBackendError(f"no worker process: {why}.")

    threads = torch.get_num_threads()

    def work(answers: AnswerFolder) -> None:
        if threads == os.cpu_count():  # else code asks for the threads by their number, and waits for ever
            generate_code_for(threads)
        try:
            renew_compile_threads()
            text = _DONE + produce()
        except (Exception, KeyboardInterrupt) as error:  # told to the parent, which raises it
            text = f"{_FAILED}{type(error).__name__}: {error}"
        answers.answer(text)

    try:
        end = run(Job(work, seconds=timeout), JobResources(threads=1), logged=False, patience=patience)
    except OSError as error:
        raise NoWorkerError(f"no worker process: {error}.") from error
    if end.answer.startswith(_FAILED):
        raise CheckedBackendError(f"failed in a worker process: {end.answer.removeprefix(_FAILED)}")
    return end.answer.removeprefix(_DONE) if end.answer else end
