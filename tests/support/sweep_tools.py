"""Cases, results and databases of sweeps, made without running any model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from checked_backend.findings import Coverage, Finding, Kind
from checked_backend.report import Report
from checked_backend.sweep.case import Case, CaseResult, Settings
from checked_backend.sweep.database import Attempt, Database, Run
from checked_backend.sweep.drive import Plan, Sweep
from checked_backend.sweep.job import Job, JobResources
from checked_backend.sweep.status import Status
from checked_backend.sweep.summary import Summary, summarize

__all__ = ["VERSIONS", "asked", "failing", "jobs_of", "outcome", "plan_of", "run_with", "scripted", "summary_of"]

VERSIONS = {"torch": "2.13.0", "python": "3.11.7"}


def outcome(status: str = "pass", **values: Any) -> CaseResult:
    """An outcome."""
    return CaseResult(Status(status), **values)


def jobs_of(*models: str, settings: Settings | None = None, suite: str = "python:models.py") -> list[Job]:
    """A job for each model."""
    return [Job("python:/models.py", Case(suite, model, compiler="eager"), settings or Settings()) for model in models]


def plan_of(jobs: Sequence[Job], versions: Mapping[str, str] | None = None, source: str = "a") -> Plan:
    """A plan with these jobs."""
    return Plan(jobs, {job.case.suite: source for job in jobs}, versions or VERSIONS, 0)


def scripted(
    answers: Mapping[str, Sequence[str] | str], ran: list[str]
) -> Callable[[Job, JobResources, Callable[[int], None]], CaseResult]:
    """A runner whose answers are known: by model, in the order of attempts."""

    def run(job: Job, _place: JobResources, _started: Callable[[int], None]) -> CaseResult:
        ran.append(job.case.model)
        told = answers.get(job.case.model, "pass")
        return outcome(told if isinstance(told, str) else told[min(job.attempt, len(told) - 1)])

    return run


def run_with(database: Database, outcomes: Mapping[str, CaseResult], torch: str = "2.13.0", state: str = "s") -> Run:
    """A run in a database, with an outcome for each model."""
    run = database.begin("", {**VERSIONS, "torch": torch})
    for model, result in outcomes.items():
        database.add(run, Attempt(Case("python:models.py", model), 0, "", state, result))
    return run


def summary_of(folder: Path, outcomes: Mapping[str, CaseResult], torch: str = "2.13.0") -> Summary:
    """A run as it is read from a database."""
    with Database(folder / "summary.db", write=True) as database:
        return summarize(database, run_with(database, outcomes, torch))


def failing(**values: Any) -> CaseResult:
    """A fail with a report."""
    finding = Finding(Kind.LOGIC, "output[0]", "wrong by <b>much</b>")
    coverage = Coverage(checked={"outputs": 1}, detection_limit={"output[0]": 1e-6})
    report = Report((finding,), coverage, "model").to_json()
    return CaseResult(Status.FAIL, **{"message": "logic: output[0]", "report": report, "noise": 1e-6, **values})


def asked(folder: Path, **values: Any) -> Sweep:
    """A sweep into a database in a folder."""
    return Sweep(**{"suites": ("python:models.py",), "db": folder / "sweep.db", **values})
