"""Run a check in a process of its own, because compiled code can kill the process that runs it."""

from __future__ import annotations

from collections.abc import Callable

from checked_backend.record import Coverage, Finding, Kind
from checked_backend.report import Report
from checked_backend.report.environment import environment
from checked_backend.worker import Death, run_in_worker

__all__ = ["run_isolated"]


def run_isolated(make_report: Callable[[], Report], run_eager: Callable[[], object], *, timeout: float) -> Report:
    """Make a report in a forked worker process.

    The program need not be picklable: the worker inherits it. If it dies, a second worker runs the program in
    eager alone, to know which side kills it.

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
    made = run_in_worker(lambda: make_report().to_json(), timeout=timeout)
    if not isinstance(made, Death):
        return Report.from_json(made)
    eager = run_in_worker(lambda: str(run_eager() is None), timeout=timeout)
    return _crash_report(made, eager if isinstance(eager, Death) else None)


def _crash_report(death: Death, eager_death: Death | None) -> Report:
    eager_dies = eager_death is not None
    finding = Finding(
        kind=Kind.UNSUPPORTED if eager_dies else Kind.CRASH,
        detail="unsupported" if eager_dies else death.detail,
        subject="candidate",
        message=(
            "the process died, and so does one that runs the program in eager alone"
            if eager_dies
            else "the process that compiled and ran the program died; one that runs it in eager alone does not"
        ),
        expected=eager_death.words if eager_death else "no death",
        actual=death.words,
    )
    return Report((finding,), Coverage(checked={"program runs": 1}), title="check", environment=environment())
