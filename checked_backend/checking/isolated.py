"""Run a check in a process of its own, because compiled code can kill the process that runs it."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

from checked_backend.checking.levels import with_levels
from checked_backend.errors import CheckedBackendError, OptionError
from checked_backend.record import Coverage, Finding, Kind
from checked_backend.report import Report
from checked_backend.report.environment import environment
from checked_backend.worker import Death, cannot_differentiate_in_worker, run_in_worker

__all__ = ["run_isolated"]

_DONE, _MISUSED, _IMPOSSIBLE = "done:", "misused:", "impossible:"


def run_isolated(
    make_report: Callable[[], Report],
    run_alone: Callable[[str | Callable[..., Any] | None], object],
    compiler: str | Callable[..., Any],
    candidate: Callable[..., Any],
    *,
    timeout: float,
    gradients: bool,
) -> Report:
    """Make a report in a forked worker process.

    The program need not be picklable: the worker inherits it. If it dies, others run the program alone, in eager and
    with compilers that only trace it, to know which side and which level kills it.

    Args:
        make_report: Runs the check.
        run_alone: Runs the program in eager (None), or compiled with this Dynamo backend.
        compiler: The candidate, as the user named it.
        candidate: The candidate, with its options.
        timeout: Seconds after which a worker counts as hung.
        gradients: Whether the program is differentiated.

    Returns:
        The worker's report, or one with a finding of kind ``crash`` if it died or hung; ``unsupported`` if eager does
        too, or if only the check did not end in time.

    Raises:
        OptionError: The timeout is no positive number; or what the check raised in the worker.
        CheckedBackendError: Processes cannot be forked here (no ``fork``, or CUDA is already in use) or cannot
            differentiate, or the check itself raised in the worker.
    """
    if not timeout > 0:
        raise OptionError(f"check: timeout got {timeout!r}; valid: a number of seconds greater than 0.")
    why = cannot_differentiate_in_worker() if gradients else None
    if why is not None:  # both sides would raise that, and agree
        raise CheckedBackendError(
            f"isolate=True: a worker process cannot differentiate here. {why} Call check before the first backward "
            "pass of this process, or with gradients=False."
        )
    made = run_in_worker(lambda: _told(make_report), timeout=timeout)
    if not isinstance(made, Death):
        return _read(made)

    def death(backend: str | Callable[..., Any] | None) -> Death | None:
        ended = run_in_worker(lambda: str(run_alone(backend) is None), timeout=timeout)
        return ended if isinstance(ended, Death) else None

    finding = _finding(made, death(None))
    if finding.kind.fails and made.hung and death(candidate) is None:
        finding = _slow(made)
    (finding,) = with_levels([finding], compiler, lambda backend: [finding] if death(backend) else [])
    return Report((finding,), Coverage(checked={"program runs": 1}), title="check", environment=environment())


def _told(make_report: Callable[[], Report]) -> str:
    try:
        text = _DONE + make_report().to_json()
    except OptionError as error:
        return f"{_MISUSED}{error}"
    except CheckedBackendError as error:
        return f"{_IMPOSSIBLE}{error}"
    _exercise_heap()
    return text


def _read(text: str) -> Report:
    if text.startswith(_MISUSED):
        raise OptionError(text.removeprefix(_MISUSED))
    if text.startswith(_IMPOSSIBLE):
        raise CheckedBackendError(text.removeprefix(_IMPOSSIBLE))
    return Report.from_json(text.removeprefix(_DONE))


def _exercise_heap() -> None:
    """Free and allocate memory of many sizes: if its records were overwritten, the allocator dies now and not later."""
    gc.collect()
    for _ in range(2):
        held = [bytearray(2**power) for power in range(4, 22) for _ in range(8)]
        del held


def _finding(death: Death, eager_death: Death | None) -> Finding:
    what = "did not end in time" if death.hung else "died"
    other = f"one that runs it in eager alone does{'' if death.hung else ' not'}"
    if eager_death is not None:
        return Finding(
            kind=Kind.UNSUPPORTED,
            detail="unsupported",
            subject="candidate",
            message=f"the process {what}, and so does one that runs the program in eager alone",
            expected=eager_death.words,
            actual=death.words,
        )
    return Finding(
        kind=Kind.CRASH,
        detail=death.detail,
        subject="candidate",
        message=f"the process that compiled and ran the program {what}; {other}",
        expected="an end" if death.hung else "no death",
        actual=death.words,
    )


def _slow(death: Death) -> Finding:
    return Finding(
        kind=Kind.UNSUPPORTED,
        detail="unsupported",
        subject="candidate",
        message="the check did not end in time; the compiled program alone, called as given, does; raise `timeout`",
        expected="an end",
        actual=death.words,
    )
