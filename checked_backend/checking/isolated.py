"""Run a check in a process of its own, because compiled code can kill the process that runs it."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from checked_backend.checking.merge import with_levels
from checked_backend.errors import CheckedBackendError, OptionError
from checked_backend.findings import Coverage, EvidenceKey, Finding, Kind
from checked_backend.process.job import JobEnd
from checked_backend.process.memory import memory_limit_lifted, process_limited
from checked_backend.process.worker import NoWorkerError, cannot_differentiate_in_worker, run_in_worker
from checked_backend.regions.failure import Keep
from checked_backend.regions.unsupported import limit_of, no_process_here, nothing_compiles, out_of_memory
from checked_backend.report import Report
from checked_backend.report.environment import environment
from checked_backend.report.write import write_whole

_DONE, _MISUSED, _IMPOSSIBLE = "done", "misused", "impossible"


def run_isolated(
    make_report: Callable[[Keep], Report],
    run_alone: Callable[[str | Callable[..., Any] | None], object],
    compiler: str | Callable[..., Any] | None,
    candidate: Callable[..., Any],
    *,
    timeout: float,
    gradients: bool,
) -> Report:
    """Make a report in a forked worker process.

    The program need not be picklable: the worker inherits it. If the worker dies, others run the program alone, in
    eager and with compilers that only trace it, to find out which side and which level kills it.

    Args:
        make_report: Runs the check. It gives its findings to the function that it gets, before it looks further.
        run_alone: Runs the program in eager (None), or compiled with this Dynamo backend.
        compiler: The candidate, as the user named it; None if it compiles nothing, so that there are no levels.

    Returns:
        The worker's report. If the worker died or hung: its findings until then, or else a finding of kind ``crash``.
        The kind is ``unsupported`` if eager dies too, if the worker died of the system's limits, or if only the check
        did not end in time.

    Raises:
        OptionError: The timeout is no positive number; or the check raised this in the worker.
        CheckedBackendError: Processes cannot be forked here (no ``fork``, or CUDA is already in use) or cannot
            differentiate, or the check itself raised in the worker.
    """
    if not timeout > 0:
        raise OptionError(f"check: timeout got {timeout!r}; valid: a number of seconds greater than 0.")

    def death(backend: str | Callable[..., Any] | None) -> JobEnd | None:
        ended = run_in_worker(lambda: str(run_alone(backend) is None), timeout=timeout)
        return ended if isinstance(ended, JobEnd) else None

    try:
        run_in_worker(str, timeout=timeout)
        why = cannot_differentiate_in_worker() if gradients else None
        if why is not None:  # both sides would raise this, and so agree
            raise CheckedBackendError(
                f"isolate=True: a worker process cannot differentiate here. {why} Call check before the first backward "
                "pass of this process, or with gradients=False."
            )
        with tempfile.TemporaryDirectory(prefix="checked_backend_") as folder:
            known = Path(folder) / "known.json"
            made = run_in_worker(lambda: _told(make_report, known), timeout=timeout)
            if not isinstance(made, JobEnd):
                return _read(made)
            if known.exists():
                return _stopped(Report.from_json(known.read_text("utf-8")), made)
        finding = _finding(made, death(None))
        if finding.fails and made.kind != "hang" and process_limited():
            finding = _of_limits(timeout, lambda: death(candidate)) or finding
        if finding.kind.fails and made.kind == "hang" and death(candidate) is None:
            why = "the check did not end in time; the compiled program alone, called as given, does; raise `timeout`"
            finding = _unsupported(made, why, "an end")
        if compiler is not None:
            (finding,) = with_levels([finding], compiler, lambda backend: [finding] if death(backend) else [])
    except NoWorkerError as error:
        short = no_process_here(error)
        if short is None:
            raise
        finding = short
    return _report_of(finding)


def _report_of(finding: Finding) -> Report:
    return Report((finding,), Coverage(checked={"program runs": 1}), environment=environment())


def _stopped(report: Report, death: JobEnd) -> Report:
    """The findings of a process that died while it localized them."""
    words = f"the process that looked for the operator died: {death.cause}"
    findings = [
        replace(finding, evidence={**finding.evidence, EvidenceKey.STOPPED: words}) if finding.fails else finding
        for finding in report.findings
    ]
    return replace(report, findings=tuple(findings), environment=environment())


def _of_limits(timeout: float, death: Callable[[], JobEnd | None]) -> Finding | None:
    """A finding if a process died of a limit that the system has set; None if it did not.

    If so, a process that compiles the smallest program dies too, or the program alone does not die without the limit,
    if the limit may be lifted.
    """

    def control() -> str:
        found = nothing_compiles()
        return "" if found is None else _report_of(found).to_json()

    tried = run_in_worker(control, timeout=timeout)
    if isinstance(tried, JobEnd):
        return out_of_memory(f"a process that compiles the least program dies too: {tried.cause}")
    if tried:
        return Report.from_json(tried).findings[0]
    with memory_limit_lifted() as lifted:
        if lifted and death() is None:
            return out_of_memory("without the limit of this process's memory it does not die")
    return None


def _told(make_report: Callable[[Keep], Report], known: Path) -> str:
    def keep(findings: Sequence[Finding]) -> None:
        write_whole(Report(tuple(findings), Coverage(checked={"program runs": 1})).to_json(), known)

    try:
        text = make_report(keep).to_json()
    except CheckedBackendError as error:
        return f"{_MISUSED if isinstance(error, OptionError) else _IMPOSSIBLE}:{error}"
    except (MemoryError, OSError) as error:
        short = limit_of(error)  # the check itself got no memory, or no room
        if short is None:
            raise
        return f"{_DONE}:{_report_of(short).to_json()}"
    _exercise_heap()
    return f"{_DONE}:{text}"


def _read(text: str) -> Report:
    how, _, told = text.partition(":")
    if how != _DONE:
        raise (OptionError if how == _MISUSED else CheckedBackendError)(told)
    return Report.from_json(told)


def _exercise_heap() -> None:
    """Free and allocate memory of many sizes. If the allocator's records were overwritten, it dies now, not later."""
    gc.collect()
    for _ in range(2):
        held = [bytearray(2**power) for power in range(4, 22) for _ in range(8)]
        del held


def _finding(death: JobEnd, eager_death: JobEnd | None) -> Finding:
    hung = death.kind == "hang"
    what, does, expected = ("did not end in time", "does", "an end") if hung else ("died", "does not", "no death")
    if eager_death is not None:
        message = f"the process {what}, and so does one that runs the program in eager alone"
        return _unsupported(death, message, eager_death.cause)
    message = f"the process that compiled and ran the program {what}; one that runs it in eager alone {does}"
    told = Finding(Kind.CRASH, "candidate", message, death.detail, expected=expected, actual=death.cause)
    return replace(told, evidence={EvidenceKey.WHERE: death.where} if death.where else {})


def _unsupported(death: JobEnd, message: str, expected: str) -> Finding:
    return Finding(Kind.UNSUPPORTED, "candidate", message, "unsupported", expected=expected, actual=death.cause)
