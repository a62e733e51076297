"""The verb ``sweep``, and the part of ``report`` that shows a database of sweeps."""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from checked_backend.cli.printing import print_text
from checked_backend.errors import SuiteError
from checked_backend.findings import Verdict
from checked_backend.process.child import default_memory
from checked_backend.process.interrupt import terminable
from checked_backend.report.write import write_whole
from checked_backend.sweep.case import Settings
from checked_backend.sweep.database import Database, Run
from checked_backend.sweep.drive import Sweep, merge, plan_sweep, run_sweep, statuses_of, warm_processes
from checked_backend.sweep.job import JobResources
from checked_backend.sweep.plan import Request, Selection, parse_modes, resolved_compiler
from checked_backend.sweep.render.data import render_json
from checked_backend.sweep.render.html import render_html
from checked_backend.sweep.render.junit import render_junit
from checked_backend.sweep.render.text import render_text
from checked_backend.sweep.rules import TAGS, load_rules
from checked_backend.sweep.summary import Summary, SweepComparison, compare, find_run, summarize

__all__ = ["Files", "refuse_outside_sweeps", "report_sweep", "sweep"]

_STDOUT = "-"
_MOST_GIB = 1e6

Words = list[str] | None


def sweep(
    suites: Annotated[
        Words,
        typer.Argument(
            metavar="SUITE",
            help="huggingface, timm, python:FILE.py, dumps:DIR or torchbench:DIR; with --merge, databases.",
            show_default=False,
        ),
    ] = None,
    db: Annotated[Path, typer.Option(metavar="FILE", help="Keeps results; a sweep goes on where it ended.")] = Path(
        "checked_backend_sweep.db"
    ),
    mode: Annotated[
        Words, typer.Option(metavar="MODE[:DTYPE,...]", help="inference or training; may be repeated.")
    ] = None,
    dtype: Annotated[
        Words, typer.Option(metavar="DTYPE", help="float32, bfloat16, float16, amp; for modes that name none.")
    ] = None,
    device: Annotated[Words, typer.Option(metavar="DEVICE", help="cpu or cuda; may be repeated.")] = None,
    compiler: Annotated[
        Words,
        typer.Option(metavar="C", help="A backend, or FILE.py:NAME; may be repeated. Default inductor."),
    ] = None,
    compiler_option: Annotated[
        Words, typer.Option(metavar="KEY=VALUE", help="Handed to the compiler; may be repeated.")
    ] = None,
    optimizer: Annotated[
        str | None, typer.Option(metavar="NAME[:KEY=VALUE,...]", help="In training, step it: Adam, SGD:lr=0.1.")
    ] = None,
    dynamic: Annotated[bool, typer.Option("--dynamic/--static", help="With dynamic shapes.")] = False,
    only: Annotated[Words, typer.Option(metavar="NAME", help="Models to run; * stands for any text.")] = None,
    exclude: Annotated[Words, typer.Option(metavar="NAME", help="Models not to run.")] = None,
    skip_tag: Annotated[
        Words, typer.Option("--skip", metavar="TAG", help=f"Skip models that rules call {', '.join(TAGS)}.")
    ] = None,
    canary: Annotated[bool, typer.Option("--canary", help="TorchBench's canary models too.")] = False,
    config: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="Rules in YAML, added to those that come with this.")
    ] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, metavar="N", help="Where no rule says otherwise.")] = None,
    timeout: Annotated[float, typer.Option(min=0.1, metavar="SECONDS", help="After which a case is ended.")] = 1800.0,
    memory: Annotated[
        float | None, typer.Option(metavar="GIB", help="What a case may hold; default four fifths of all, by --jobs.")
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, metavar="N", help="Cases at a time.")] = 1,
    threads: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Of torch for each case; default the cores by --jobs.")
    ] = None,
    localize: Annotated[bool, typer.Option("--localize", help="Find the operator after a failure.")] = False,
    engine: Annotated[str, typer.Option(metavar="ENGINE", help="local or ray.")] = "local",
    address: Annotated[str | None, typer.Option(metavar="ADDRESS", help="Of the Ray cluster.")] = None,
    shard: Annotated[str, typer.Option(metavar="I/N", help="Run the I-th of N parts only, from 1.")] = "1/1",
    merging: Annotated[bool, typer.Option("--merge", help="Put the databases named into --db.")] = False,
    rerun: Annotated[
        Words, typer.Option(metavar="STATUS", help="Run again what ended so: failed, all, crash, hang, ...")
    ] = None,
    flaky: Annotated[int, typer.Option(min=1, metavar="N", help="Run each case N times.")] = 1,
    run_name: Annotated[str, typer.Option("--run", metavar="NAME", help="A name for this run, to compare with.")] = "",
    fresh: Annotated[
        bool, typer.Option("--fresh", help="A new Python for each case, not a fork of one that has imported torch.")
    ] = False,
    listing: Annotated[bool, typer.Option("--list", help="Say which cases there are, and run none.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> Verdict | None:
    """Check a whole suite of models, each in a process of its own. Its code is run: trust it.

    Results are kept in a database as they come; `checked-backend report DB` shows and compares them.
    """
    console = Console(stderr=True, markup=False, highlight=False, emoji=False)
    if merging:
        merge(db, [Path(part) for part in suites or ()], lambda line: console.print(line, soft_wrap=True))
        return None
    if engine not in ("local", "ray"):
        raise SuiteError(f"--engine got {engine!r}; expected local or ray")
    if not math.isfinite(timeout):
        raise SuiteError(f"--timeout got {timeout}; expected seconds")
    for tag in skip_tag or ():
        if tag not in TAGS:
            raise SuiteError(f"--skip got {tag!r}; expected {', '.join(TAGS)}")
    settings = Settings(
        batch_size=batch_size,
        timeout=timeout,
        localize=localize,
        optimizer=_optimizer(optimizer),
        compiler_options=_compiler_options(compiler_option or ()),
    )
    asked = Sweep(
        suites=suites or (),
        db=db,
        request=Request(
            ways=parse_modes(mode or ["inference"], dtype or ["float32"]),
            devices=_devices(device or ["cpu"]),
            compilers=list(dict.fromkeys(map(resolved_compiler, compiler or ["inductor"]))),
            dynamic=(dynamic,),
            settings=settings,
        ),
        selection=Selection(only or (), exclude or (), skip_tag or (), canary, _shard(shard)),
        rules=load_rules(config or ()),
        name=run_name,
        jobs=jobs,
        place=JobResources(_memory(memory, jobs), threads or max(1, _cores() // jobs), folder=str(Path.cwd())),
        engine=engine,
        address=address,
        rerun=statuses_of(rerun or ()),
        repeats=flaky,
        fresh=fresh,
    )
    if listing:
        for job in plan_sweep(asked).jobs:
            skipped = "" if job.settings.skip is None else f"  skipped: {job.settings.skip}"
            print_text(f"{job.case.suite}  {job.case}{skipped}")
        return None
    with terminable(), warm_processes(asked) as forking:
        summary, ran = run_sweep(asked, console, forking=forking)
    if not (summary.cases or summary.waiting or as_json) and asked.selection.shard != (1, 1):
        console.print(f"part {shard} has no cases: there are fewer cases than parts", soft_wrap=True)
        return Verdict.PASS
    print_text(render_json(summary) if as_json else render_text(summary))
    if not ran:
        again = "none of it ended so" if asked.rerun else "--rerun runs cases again"
        console.print(f"all of it had results in {db} already; {again}", soft_wrap=True)
    return summary.verdict


class Files:
    """The files that `report_sweep` writes.

    Args:
        html: Path of the HTML page.
        json_file: Path of the JSON; ``-`` prints it.
        junit: Path of the JUnit XML.
    """

    def __init__(
        self,
        html: Path | None = None,
        json_file: str | None = None,
        junit: Path | None = None,
    ) -> None:
        self._writers: Sequence[tuple[Path | None, Callable[[Summary, SweepComparison | None], str]]] = (
            (html, render_html),
            (junit, lambda summary, _comparison: render_junit(summary)),
            (None if json_file in (None, _STDOUT) else Path(str(json_file)), render_json),
        )
        self.prints_json = json_file == _STDOUT

    def write(self, summary: Summary, comparison: SweepComparison | None) -> None:
        """Write each file that was asked for."""
        for path, render in self._writers:
            if path is not None:
                write_whole(render(summary, comparison).rstrip("\n") + "\n", path)


def refuse_outside_sweeps(**options: object) -> None:
    """Raise if an option is given that only applies to a database of sweeps.

    Raises:
        BadParameter: Such an option is given.
    """
    for name, value in options.items():
        if value is not None:
            raise typer.BadParameter("only a database of sweeps has that", param_hint=f"--{name}")


def report_sweep(path: Path, run: str | None, since: str | None, files: Files) -> Verdict:
    """Show a run of a database, and what changed since an earlier one.

    Args:
        path: The database.
        run: The run's number, name or torch version; default the last run.
        since: The run to compare with; default the one before, if there is one.
        files: The files to write.

    Raises:
        SuiteError: The file is no database of sweeps, or has no such run.
    """
    with Database(path) as database:
        runs = database.runs()
        if not runs:
            raise SuiteError(f"{path}: no runs in it")
        shown = runs[-1] if run is None else find_run(runs, run)
        earlier = [other for other in runs if other.number < shown.number]
        before = earlier[-1] if earlier else None
        if since is not None:
            before = find_run(earlier if _has_run(earlier, since) else runs, since)
        summary = summarize(database, shown)
        comparison = None if before is None else compare(summarize(database, before), summary)
    files.write(summary, comparison)
    print_text(render_json(summary, comparison) if files.prints_json else render_text(summary, comparison))
    return summary.verdict


def _has_run(runs: Sequence[Run], word: str) -> bool:
    try:
        find_run(runs, word)
    except SuiteError:
        return False
    return True


def _compiler_options(words: Sequence[str]) -> dict[str, Any]:
    return dict(_parsers().parse_value(word, "--compiler-option") for word in words) if words else {}


def _optimizer(text: str | None) -> str | None:
    if text is not None:
        _parsers().parse_optimizer(text)  # refuses a misspelt optimizer before anything runs
    return text


def _parsers() -> Any:
    return importlib.import_module("checked_backend.checking.target")  # needs torch


def _devices(words: Sequence[str]) -> list[str]:
    for word in words:
        if word not in ("cpu", "cuda"):
            raise SuiteError(f"--device got {word!r}; expected cpu or cuda")
    return list(dict.fromkeys(words))


def _shard(text: str) -> tuple[int, int]:
    which, _, many = text.partition("/")
    if not (which.isdecimal() and many.isdecimal() and 1 <= int(which) <= int(many)):
        raise SuiteError(f"--shard got {text!r}; expected I/N with I from 1 to N, for example 1/4")
    return int(which), int(many)


def _memory(gib: float | None, jobs: int) -> int | None:
    if gib is not None:
        if not 0 < gib < _MOST_GIB:
            raise SuiteError(f"--memory got {gib}; expected GiB, for example 8")
        return int(gib * 2**30)
    there = default_memory()
    return None if there is None else there // jobs


def _cores() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # only Linux says which cores this process may use
        return os.cpu_count() or 1
