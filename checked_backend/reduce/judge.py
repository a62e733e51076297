"""Ask whether a trial still goes wrong, in a worker process, so that the compiler may crash or hang."""

from __future__ import annotations

from collections.abc import Callable

from checked_backend._torch import without_compile_caches
from checked_backend.errors import CheckedBackendError
from checked_backend.record import Coverage, Finding, Kind
from checked_backend.regions.trial import Trial
from checked_backend.report import Report
from checked_backend.worker import Death, cannot_fork, run_in_worker

__all__ = ["Judge", "judge_trial"]

Judge = Callable[[Trial, float], tuple[Finding, ...] | None]
"""Finds what is wrong with a trial within so many seconds; None if that could not be found out."""


def judge_trial(trial: Trial, timeout: float) -> tuple[Finding, ...] | None:
    """Compile a trial without caches and compare it with eager, noise told from errors.

    Args:
        trial: The trial.
        timeout: Seconds, after which the compiler counts as hung.

    Returns:
        What was found; None for a program that eager cannot run. The death of the process is a finding of kind
        ``crash``. Where no process can be forked the trial runs in this one.
    """

    def produce() -> str:
        with without_compile_caches():
            return Report(trial.findings(), Coverage(), title="trial").to_json()

    try:
        answer = produce() if cannot_fork() else run_in_worker(produce, timeout=timeout)
    except CheckedBackendError:
        return None  # eager raised: this is no program
    if isinstance(answer, Death):
        message = "the process that compiled and ran the program died"
        return (Finding(Kind.CRASH, "candidate", message, answer.detail, expected="no death", actual=answer.words),)
    return Report.from_json(answer).findings
