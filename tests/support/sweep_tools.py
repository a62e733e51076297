"""Cases, results and folders of sweeps, made without running any model."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from checked_backend import Coverage, Finding, Kind, Report
from checked_backend.process.job import JobResources
from checked_backend.runs.case import Case, CaseResult, Status
from checked_backend.runs.pool import LocalPool
from checked_backend.runs.results import Results, WantedCase
from checked_backend.runs.summary import Summary, summarize
from checked_backend.sweep.drive import Plan, run_sweep
from checked_backend.sweep.examine import examine
from checked_backend.sweep.plan import Sweep, SweepJob
from checked_backend.sweep.rules import Settings

VERSIONS = {"torch": "2.13.0", "python": "3.11.7"}


def outcome(status: str = "pass", **values: Any) -> CaseResult:
    return CaseResult(Status(status), **values)


def examined(suite: str, model: str, settings: Settings | None = None, **way: Any) -> CaseResult:
    """Examine a model of a suite, in this process: the last answer."""
    answers: list[CaseResult] = []
    case = Case(suite.partition(":")[0], model, **{"compiler": "eager", **way})
    examine(suite, case, settings or Settings(), note=lambda _: None, answer=answers.append)
    return answers[-1]


def jobs_of(*models: str, settings: Settings | None = None, suite: str = "python:models.py") -> list[SweepJob]:
    cases = [Case(suite, model, compiler="eager") for model in models]
    return [SweepJob("python:/models.py", case, settings or Settings()) for case in cases]


def plan_of(jobs: Sequence[SweepJob], source: str = "a", **values: Any) -> Plan:
    return Plan([replace(job, state=job.settings.digest(source)) for job in jobs], VERSIONS, 0, **values)


def scripted(
    answers: Mapping[str, Sequence[str] | str], ran: list[str]
) -> Callable[[SweepJob, JobResources, Callable[[int], None]], CaseResult]:
    """A runner whose answers are known: by model, in the order of attempts."""
    counts: Counter[str] = Counter()

    def run(job: SweepJob, _resources: JobResources, _started: Callable[[int], None]) -> CaseResult:
        model = job.case.model
        ran.append(model)
        counts[model] += 1
        told = answers.get(model, "pass")
        return outcome(told if isinstance(told, str) else told[min(counts[model], len(told)) - 1])

    return run


def asked(folder: Path, **values: Any) -> Sweep:
    return Sweep(**{"suites": ("python:models.py",), "out": folder / "sweep", **values})


def swept(
    folder: Path, plan: Plan, answers: Mapping[str, Sequence[str] | str] | None = None, **values: Any
) -> tuple[Summary, list[str]]:
    """Run a sweep whose answers are known. Returns its summary, and the models that ran."""
    ran: list[str] = []
    pool = LocalPool(scripted(answers or {}, ran), JobResources())
    summary, count = run_sweep(asked(folder, **values), Console(file=io.StringIO()), plan, pool)
    assert count == len(ran)
    return summary, ran


def keep(path: Path, outcomes: Mapping[str, CaseResult], torch: str = "2.13.0", state: str = "s") -> Path:
    """A folder with a result for each model."""
    with Results(path, write=True) as results:
        results.begin({**VERSIONS, "torch": torch})
        results.ask([WantedCase(Case("python:models.py", model), state) for model in outcomes])
        for model, result in outcomes.items():
            results.add(Case("python:models.py", model), result)
    return path


def summary_of(folder: Path, outcomes: Mapping[str, CaseResult], torch: str = "2.13.0") -> Summary:
    """A run as it is read from a folder."""
    with Results(keep(folder / f"torch{torch}", outcomes, torch)) as results:
        return summarize(results)


def failing(**values: Any) -> CaseResult:
    """A fail with a report."""
    finding = Finding(Kind.LOGIC, "output[0]", "wrong by <b>much</b>")
    coverage = Coverage(checked={"outputs": 1}, detection_limit={"output[0]": 1e-6})
    report = Report((finding,), coverage, "model").to_json()
    return CaseResult(Status.FAIL, **{"message": "logic: output[0]", "report": report, "noise": 1e-6, **values})
