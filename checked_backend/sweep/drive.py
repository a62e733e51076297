"""Run a sweep: list the models, plan the cases, run those without a result, and keep each result at once."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from rich.console import Console

from checked_backend.errors import SuiteError
from checked_backend.sweep.case import CaseResult
from checked_backend.sweep.database import Attempt, Database, Run
from checked_backend.sweep.engine import Engine, LocalEngine
from checked_backend.sweep.job import Forking, Job, JobResources, run_job
from checked_backend.sweep.plan import Listed, Request, Selection, fingerprint_of, list_suite, planned
from checked_backend.sweep.progress import Progress
from checked_backend.sweep.ray_engine import RayEngine
from checked_backend.sweep.rules import Rules
from checked_backend.sweep.status import Status
from checked_backend.sweep.summary import Summary, summarize
from checked_backend.sweep.warm import WarmProcesses, can_fork, modules_of

__all__ = ["Plan", "Sweep", "merge", "plan_sweep", "run_sweep", "statuses_of", "warm_processes"]

_FAILED = "failed"
_ALL = "all"
_LOCAL = "local"


@dataclass(frozen=True, slots=True)
class Sweep:
    """A sweep as the user asked for it.

    Attributes:
        suites: The suites, as the user names them.
        db: The database for the results.
        request: How to run each model.
        selection: Which models to run.
        rules: Known properties of models.
        name: The user's name for the run.
        jobs: How many jobs run at a time.
        place: The resources of each job.
        engine: ``local`` or ``ray``.
        address: The address of a Ray cluster.
        rerun: Statuses whose cases run again.
        repeats: How often to run each case.
        fresh: Whether each case gets a fresh Python, and is never forked from one that has imported torch.
    """

    suites: Sequence[str]
    db: Path
    request: Request = field(default_factory=Request)
    selection: Selection = field(default_factory=Selection)
    rules: Rules = field(default_factory=Rules)
    name: str = ""
    jobs: int = 1
    place: JobResources = field(default_factory=JobResources)
    engine: str = "local"
    address: str | None = None
    rerun: Sequence[str] = ()
    repeats: int = 1
    fresh: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """The cases of a sweep, and the versions they run under.

    Attributes:
        jobs: The cases of this part of the sweep, in order, each with its settings.
        sources: Fingerprints of suites by label.
        versions: Versions of the libraries that results depend on.
        devices: The number of CUDA devices here.
        compilers: Fingerprints of the files of compilers, by their names; empty of one that is a backend's name.
        others: The cases of other parts.
    """

    jobs: Sequence[Job]
    sources: Mapping[str, str]
    versions: Mapping[str, str]
    devices: int
    compilers: Mapping[str, str] = field(default_factory=dict)
    others: Sequence[Job] = ()


def warm_processes(asked: Sweep) -> AbstractContextManager[Forking | None]:
    """Processes that fork a sweep's workers, one for each concurrent job; None if they cannot be forked."""
    if asked.fresh or asked.engine != _LOCAL or not can_fork(asked.request.devices):
        return nullcontext()
    return WarmProcesses(asked.jobs, modules_of(asked.suites), asked.place)


def plan_sweep(asked: Sweep, forking: Forking | None = None) -> Plan:
    """Find out which cases a sweep has. The only code that runs is what lists a suite's models.

    Args:
        forking: Forks the process that lists models; None for a fresh Python.

    Raises:
        SuiteError: A suite, a filter or a device cannot be used.
    """
    if not asked.suites:
        raise SuiteError("name a suite: huggingface, timm, python:FILE.py, dumps:DIR or torchbench:DIR")
    listed: list[Listed] = []
    for text in asked.suites:
        suite = list_suite(text, asked.request.compilers, asked.place, forking)
        if suite.label in [other.label for other in listed]:
            raise SuiteError(f"two suites are called {suite.label}; sweep them into two databases")
        listed.append(suite)
    devices = max(suite.devices for suite in listed)
    if "cuda" in asked.request.devices and not devices and asked.engine == _LOCAL:
        raise SuiteError("--device cuda: torch finds no CUDA device here")
    asked.selection.refuse_unknown([str(model["name"]) for suite in listed for model in suite.models])
    jobs = [job for suite in listed for job in planned(suite, asked.request, asked.rules, asked.selection)]
    all_parts, mine = replace(asked.selection, shard=(1, 1)), {job.case.key for job in jobs}
    whole = [job for suite in listed for job in planned(suite, asked.request, asked.rules, all_parts)]
    versions = {name: version for suite in listed for name, version in suite.versions.items()}
    return Plan(
        jobs,
        {suite.label: suite.fingerprint for suite in listed},
        versions,
        devices,
        {compiler: fingerprint_of(compiler) for compiler in asked.request.compilers},
        [job for job in whole if job.case.key not in mine],
    )


def run_sweep(
    asked: Sweep,
    console: Console,
    plan: Plan | None = None,
    engine: Engine | None = None,
    forking: Forking | None = None,
) -> tuple[Summary, int]:
    """Run the cases that have no result yet, and summarize all the cases asked for.

    Args:
        console: Where to print progress.
        plan: The plan of the sweep, if it has been made already.
        engine: Where jobs run, instead of the engine that the sweep names.
        forking: Forks the processes of jobs on this machine; None for fresh ones.

    Returns:
        A summary of the cases asked for, and the number of jobs that ran now.

    Raises:
        SuiteError: A suite, filter, device, engine or database cannot be used.
    """
    plan = plan or plan_sweep(asked, forking)
    with Database(asked.db, write=True) as database:
        run = database.begin(asked.name, plan.versions)
        database.ask(run, [(job.case, _state(job, plan)) for job in (*plan.jobs, *plan.others)])
        todo = _todo(asked, plan, database, run)
        engine = engine or _engine(asked, plan, forking)
        progress = Progress(len(todo), len(plan.jobs) - len(todo), console)
        with progress, closing(engine.run(todo, progress.begun)) as outcomes:
            for job, outcome in outcomes:
                database.add(run, _result(job, outcome, plan))
                progress.done(job, outcome)
        summary = summarize(database, run).of({job.case.key for job in plan.jobs})
    return summary, len(todo)


def _todo(asked: Sweep, plan: Plan, database: Database, run: Run) -> list[Job]:
    runnable = []
    for job in plan.jobs:
        if job.settings.skip is not None:
            database.add(run, _result(job, CaseResult(Status.SKIPPED, job.settings.skip), plan))
        else:
            runnable.append(job)
    again: list[Job] = []
    if asked.rerun:
        again = database.ask_again(run, {(job.case.key, _state(job, plan)): job for job in runnable}, asked.rerun)
    made = database.attempts(run)
    return again + [
        Job(job.spec, job.case, job.settings, attempt)
        for attempt in range(asked.repeats)
        for job in runnable
        if attempt not in made.get((job.case.key, _state(job, plan)), {})
    ]


def _result(job: Job, outcome: CaseResult, plan: Plan) -> Attempt:
    return Attempt(job.case, job.attempt, "", _state(job, plan), outcome)


def _state(job: Job, plan: Plan) -> str:
    compiler = plan.compilers.get(job.case.compiler, "")
    state = job.settings.digest(plan.sources[job.case.suite] + (compiler and f", compiled by {compiler}"))
    return state if job.settings.skip is None else f"skipped {state}"


def _engine(asked: Sweep, plan: Plan, forking: Forking | None) -> Engine:
    if asked.engine == "ray":
        return RayEngine(asked.address, asked.place)
    gpus = _visible_gpus(plan.devices) if "cuda" in asked.request.devices else ()
    return LocalEngine(asked.jobs, asked.place, gpus, partial(run_job, forking=forking))


def _visible_gpus(count: int) -> Sequence[str]:
    """The GPUs that jobs may have: those that the user leaves visible, by the user's names for them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = [name.strip() for name in visible.split(",")] if visible else [str(number) for number in range(count)]
    return names[:count]


def statuses_of(words: Sequence[str]) -> list[str]:
    """The statuses that ``--rerun`` names: ``failed``, ``all``, or statuses by name.

    Raises:
        SuiteError: A status is unknown.
    """
    found: list[str] = []
    for word in words:
        if word == _FAILED:
            found += [status.value for status in Status if status.failed]
        elif word == _ALL:
            found += [status.value for status in Status if status is not Status.SKIPPED]
        else:
            try:
                found.append(Status(word.replace("_", " ")).value)
            except ValueError:
                valid = ", ".join([_FAILED, _ALL, *(status.value for status in Status)])
                raise SuiteError(f"--rerun got {word!r}; expected {valid}") from None
    return found


def merge(into: Path, parts: Sequence[Path], tell: Callable[[str], None]) -> None:
    """Copy the results of several databases into one.

    Raises:
        SuiteError: A source is no database of sweeps, or is the target itself.
    """
    if not parts:
        raise SuiteError("--merge: name the databases to merge; the result goes to --db")
    with Database(into, write=True) as database:
        for part in parts:
            if part.resolve() == into.resolve():
                raise SuiteError(f"--merge: {part} is the database to write to; give another --db")
            with Database(part) as other:
                tell(f"{part}: {database.merge(other)} results")
