"""Run a sweep: list the models, plan the cases, run each without a result in its own process, keep results at once."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

from rich.console import Console

from checked_backend._torch.preload import LATE_MODULES
from checked_backend.errors import SuiteError
from checked_backend.process.job import IMPORTING, Job, JobEnd, JobResources, Warm, run
from checked_backend.process.warm import WarmProcess
from checked_backend.runs.case import CaseResult, Status
from checked_backend.runs.pool import LocalPool, Pool, RayPool
from checked_backend.runs.progress import Progress
from checked_backend.runs.results import Results, WantedCase
from checked_backend.runs.summary import Summary, summarize
from checked_backend.sweep.plan import Listed, Sweep, SweepJob, list_suite, planned

_WORK = "checked_backend.sweep.examine:answer_case"
_BEFORE_THE_MODEL = ("starting", IMPORTING)
_ALWAYS = ("torch", "checked_backend.sweep.examine", "checked_backend.sweep.suites", *LATE_MODULES)
_OF_SUITE: Mapping[str, tuple[str, ...]] = {
    "huggingface": (
        "transformers.modeling_utils",
        "transformers.masking_utils",
        "transformers.processing_utils",
        "transformers.generation.utils",
        "transformers.models.auto.modeling_auto",
    )
}


@dataclass(frozen=True, slots=True)
class Plan:
    """The cases of a sweep, and the versions they run under.

    Attributes:
        jobs: The cases of this part of the sweep, in order; ``others`` are those of other parts.
    """

    jobs: list[SweepJob]
    versions: dict[str, str]
    devices: int
    others: list[SweepJob] = field(default_factory=list)


def warm_process(asked: Sweep) -> AbstractContextManager[Warm | None]:
    """A process that is forked for a sweep's cases; None if it cannot be."""
    on_cpu = set(asked.devices) == {"cpu"}  # CUDA does not survive a fork
    if asked.fresh or asked.engine != "local" or sys.platform != "linux" or not on_cpu:
        return nullcontext()
    return WarmProcess(modules_of(asked.suites), asked.resources)


def modules_of(suites: Sequence[str]) -> list[str]:
    """What to import before a fork: no code of the user's own."""
    return [*_ALWAYS, *(module for suite in suites for module in _OF_SUITE.get(suite.partition(":")[0], ()))]


def plan_sweep(asked: Sweep, warm: Warm | None = None) -> Plan:
    """Find out which cases a sweep has. The only code that runs is what lists a suite's models.

    Raises:
        SuiteError: A suite, a filter or a device cannot be used.
    """
    if not asked.suites:
        raise SuiteError("name a suite: huggingface, timm, python:FILE.py, dumps:DIR or torchbench:DIR")
    listed: list[Listed] = []
    for text in asked.suites:
        suite = list_suite(text, asked.compilers, asked.resources, warm)
        if suite.label in [other.label for other in listed]:
            raise SuiteError(f"two suites are called {suite.label}; sweep them into two folders")
        listed.append(suite)
    devices = max(suite.devices for suite in listed)
    if "cuda" in asked.devices and not devices and asked.engine == "local":
        raise SuiteError("--device cuda: torch finds no CUDA device here")
    asked.refuse_unknown([str(model["name"]) for suite in listed for model in suite.models])
    versions = {name: version for suite in listed for name, version in suite.versions.items()}
    plan = Plan([], dict(sorted(versions.items())), devices, [])
    for suite in listed:
        mine, others = asked.split(planned(suite, asked))
        plan.jobs.extend(mine)
        plan.others.extend(others)
    return plan


def run_sweep(
    asked: Sweep,
    console: Console,
    plan: Plan | None = None,
    pool: Pool[SweepJob] | None = None,
    warm: Warm | None = None,
) -> tuple[Summary, int]:
    """Run the cases that have no result yet, and summarize all the cases asked for.

    Args:
        pool: Where jobs run, instead of the engine that the sweep names.

    Returns:
        A summary of the cases asked for, and the number of jobs that ran now.

    Raises:
        SuiteError: A suite, filter, device, engine or folder cannot be used.
    """
    plan = plan or plan_sweep(asked, warm)
    with Results(asked.out, write=True) as results:
        for why in results.damaged:
            console.print(f"{why}; it is set aside as .damaged, and its case runs again", soft_wrap=True)
        mine = [job.case for job in plan.jobs]
        results.begin(plan.versions)
        wanted = [WantedCase(job.case, job.state, skip=job.settings.skip) for job in (*plan.jobs, *plan.others)]
        results.ask(wanted, asked.rerun, set(mine))
        missing = {
            job.case: asked.repeats - len(results.done(results.wanted[job.case]))
            for job in plan.jobs
            if job.settings.skip is None
        }
        todo = [job for turn in range(asked.repeats) for job in plan.jobs if missing.get(job.case, 0) > turn]
        progress = Progress(len(todo), len(plan.jobs) - len(todo), console)
        pool = pool or _pool(asked, plan, warm)
        with progress, closing(pool.run(todo, progress.begun)) as done:
            for job, result in done:
                results.add(job.case, result)
                progress.done(job.case, result)
        return summarize(results, mine), len(todo)


def _pool(asked: Sweep, plan: Plan, warm: Warm | None) -> Pool[SweepJob]:
    if asked.engine == "ray":
        return RayPool(run_case, asked.resources, asked.address)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")  # the GPUs that the user leaves to jobs, by their names
    gpus = [name.strip() for name in visible.split(",")] if visible else [*map(str, range(plan.devices))]
    used = gpus[: plan.devices] if "cuda" in asked.devices else ()
    return LocalPool(partial(run_case, warm=warm), asked.resources, asked.jobs, used)


def run_case(
    job: SweepJob,
    resources: JobResources,
    started: Callable[[int], None] = lambda _pid: None,
    warm: Warm | None = None,
) -> CaseResult:
    """Run a case in its own process: a fork of a warm one, if there are such, or a fresh Python."""
    question = {"spec": job.spec, "case": asdict(job.case), "settings": asdict(job.settings)}
    try:
        end = run(Job(_WORK, question, job.settings.timeout), resources, warm, started)
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
    status = Status.of_end(end)
    if told is not None and told.status is Status.FAIL:
        status, words = Status.FAIL, f"{told.message}; {words}, so it looked no further"
    elif end.kind == "exit" and end.exit and end.stage in _BEFORE_THE_MODEL:  # that says nothing of the model
        status, words = Status.LOST, f"{words}: {(end.log.strip().splitlines() or [''])[-1]}"
    before = told or CaseResult(status)
    return replace(before, status=status, message=words, stage=end.stage, seconds=end.seconds, log=end.log)


def statuses_of(words: Sequence[str]) -> list[str]:
    """The statuses that ``--rerun`` names: ``failed``, ``all``, or statuses by name; others are refused."""
    groups = {
        "failed": [status.value for status in Status if status.failed],
        "all": [status.value for status in Status if status is not Status.SKIPPED],
        **{status.value: [status.value] for status in Status},
    }
    for word in words:
        if word.replace("_", " ") not in groups:
            raise SuiteError(f"--rerun got {word!r}; expected {', '.join(groups)}")
    return [status for word in words for status in groups[word.replace("_", " ")]]


def merge(into: Path, parts: Sequence[Path], tell: Callable[[str], None]) -> None:
    """Copy the results of several folders into one.

    Raises:
        SuiteError: A source is no folder of a sweep, or is the target itself.
    """
    if not parts:
        raise SuiteError("--merge: name the folders to merge; the result goes to --out")
    with Results(into, write=True) as results:
        for part in parts:
            if part.resolve() == into.resolve():
                raise SuiteError(f"--merge: {part} is the folder to write to; give another --out")
            with Results(part) as other:
                tell(f"{part}: {results.merge(other)} results")
