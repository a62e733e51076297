"""Run one case in its own process, and say what came out, however that process ends."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

from checked_backend.errors import SuiteError
from checked_backend.process.job import IMPORTING, Job, JobEnd, JobResources, Warm, run
from checked_backend.runs.case import Case, CaseResult
from checked_backend.runs.status import Status
from checked_backend.sweep.settings import Settings

_WORK = "checked_backend.sweep.examine:answer_case"
_BEFORE_THE_MODEL = ("starting", IMPORTING)


@dataclass(frozen=True, slots=True)
class SweepJob:
    """A case to run.

    Attributes:
        spec: Its suite as the process of the case finds it: ``python:/home/me/models.py``.
        state: A text that changes when its settings, its suite's source or its compiler's file do.
    """

    spec: str
    case: Case
    settings: Settings
    state: str = ""


def run_case(
    job: SweepJob,
    resources: JobResources,
    started: Callable[[int], None] = lambda _pid: None,
    warm: Warm | None = None,
) -> CaseResult:
    """Run a case in its own process: a fork of a warm one, if there are such, or a fresh Python."""
    question = {"spec": job.spec, "case": asdict(job.case), "settings": asdict(job.settings)}
    try:
        end = run(Job(_WORK, question, job.settings.timeout), resources, warm or "fresh", started)
    except OSError as error:
        result = CaseResult(Status.LOST, f"no process could be started: {error}")
    else:
        result = result_of(end)
    return replace(result, host=socket.gethostname())


def result_of(end: JobEnd) -> CaseResult:
    """What came out for a case whose process ended so."""
    told: CaseResult | None = None
    if end.answer:
        try:
            told = CaseResult.from_json(end.answer)
        except SuiteError as error:
            return CaseResult(Status.CRASH, str(error), end.stage, seconds=end.seconds, log=end.log)
    if told is not None and end.kind == "done":
        return replace(told, seconds=end.seconds, log="" if told.status is Status.PASS else end.log)
    words = f"the process {end.words} while {end.stage}"
    status = {"hang": Status.HANG, "memory": Status.OUT_OF_MEMORY}.get(end.kind, Status.CRASH)
    if told is not None and told.status is Status.FAIL:
        status, words = Status.FAIL, f"{told.message}; {words}, so it looked no further"
    elif end.kind == "exit" and end.exit and end.stage in _BEFORE_THE_MODEL:  # that says nothing of the model
        status, words = Status.LOST, f"{words}: {(end.log.strip().splitlines() or [''])[-1]}"
    before = told or CaseResult(status)
    return replace(before, status=status, message=words, stage=end.stage, seconds=end.seconds, log=end.log)
