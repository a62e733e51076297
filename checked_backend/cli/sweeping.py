"""The verb ``sweep``, and the part of ``report`` that shows a sweep."""

from __future__ import annotations

import math
from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from checked_backend.cli.options import AsJson, CompilerOptions, Memory, Words, compiler_options, cores, memory_in_bytes
from checked_backend.cli.printing import Pages, print_text, show_run
from checked_backend.errors import SuiteError
from checked_backend.findings import Verdict
from checked_backend.process.interrupt import terminable
from checked_backend.process.job import JobResources
from checked_backend.runs.data import render_json
from checked_backend.runs.results import Results
from checked_backend.runs.summary import compare, summarize
from checked_backend.runs.text import render_text
from checked_backend.sweep.drive import merge, plan_sweep, run_sweep, statuses_of, warm_process
from checked_backend.sweep.plan import Sweep, parse_modes, resolved_compiler
from checked_backend.sweep.rules import TAGS, Settings, load_rules


def sweep(
    suites: Annotated[
        Words,
        typer.Argument(
            metavar="SUITE",
            help="huggingface, timm, python:FILE.py, dumps:DIR or torchbench:DIR; with --merge, folders.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Keeps results; a sweep goes on where it ended.")] = Path(
        "checked_backend_sweep"
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
    compiler_option: CompilerOptions = None,
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
    memory: Memory = None,
    jobs: Annotated[int, typer.Option(min=1, metavar="N", help="Cases at a time.")] = 1,
    threads: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Of torch for each case; default the cores by --jobs.")
    ] = None,
    localize: Annotated[bool, typer.Option("--localize", help="Find the operator after a failure.")] = False,
    engine: Annotated[str, typer.Option(metavar="ENGINE", help="local or ray.")] = "local",
    address: Annotated[str | None, typer.Option(metavar="ADDRESS", help="Of the Ray cluster.")] = None,
    shard: Annotated[str, typer.Option(metavar="I/N", help="Run the I-th of N parts only, from 1.")] = "1/1",
    merging: Annotated[bool, typer.Option("--merge", help="Put the folders named into --out.")] = False,
    rerun: Annotated[
        Words, typer.Option(metavar="STATUS", help="Run again what ended so: failed, all, crash, hang, ...")
    ] = None,
    flaky: Annotated[int, typer.Option(min=1, metavar="N", help="Run each case N times.")] = 1,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="A new Python for each case, not a fork of one that has imported torch.")
    ] = False,
    listing: Annotated[bool, typer.Option("--list", help="Say which cases there are, and run none.")] = False,
    as_json: AsJson = False,
) -> Verdict | None:
    """Check a whole suite of models, each in a process of its own. Its code is run: trust it.

    Results are kept in a folder as they come; `checked-backend report DIR` shows them, and compares two folders.
    """
    console = Console(stderr=True, markup=False, highlight=False, emoji=False)
    if merging:
        merge(out, [Path(part) for part in suites or ()], lambda line: console.print(line, soft_wrap=True))
        return None
    if engine not in ("local", "ray"):
        raise SuiteError(f"--engine got {engine!r}; expected local or ray")
    if not math.isfinite(timeout):
        raise SuiteError(f"--timeout got {timeout}; expected seconds")
    for word in device or ():
        if word not in ("cpu", "cuda"):
            raise SuiteError(f"--device got {word!r}; expected cpu or cuda")
    for tag in skip_tag or ():
        if tag not in TAGS:
            raise SuiteError(f"--skip got {tag!r}; expected {', '.join(TAGS)}")
    which, _, many = shard.partition("/")
    if not (which.isdecimal() and many.isdecimal() and 1 <= int(which) <= int(many)):
        raise SuiteError(f"--shard got {shard!r}; expected I/N with I from 1 to N, for example 1/4")
    if optimizer is not None:  # a misspelt one is refused before anything runs
        import_module("checked_backend.checking.target").parse_optimizer(optimizer)
    settings = Settings(
        batch_size=batch_size,
        timeout=timeout,
        localize=localize,
        optimizer=optimizer,
        compiler_options=compiler_options(compiler_option),
    )
    asked = Sweep(
        suites=suites or (),
        out=out,
        ways=parse_modes(mode or ["inference"], dtype or ["float32"]),
        devices=list(dict.fromkeys(device or ["cpu"])),
        compilers=list(dict.fromkeys(map(resolved_compiler, compiler or ["inductor"]))),
        dynamic=dynamic,
        settings=settings,
        only=only or (),
        exclude=exclude or (),
        skip_tags=skip_tag or (),
        canary=canary,
        shard=(int(which), int(many)),
        rules=load_rules(config or ()),
        jobs=jobs,
        resources=JobResources(memory_in_bytes(memory, jobs), threads or cores(jobs), folder=str(Path.cwd())),
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
    with terminable(), warm_process(asked) as warm:
        summary, ran = run_sweep(asked, console, warm=warm)
    if not (summary.cases or summary.waiting or as_json) and asked.shard != (1, 1):
        console.print(f"part {shard} has no cases: there are fewer cases than parts", soft_wrap=True)
        return Verdict.PASS
    print_text(render_json(summary) if as_json else render_text(summary))
    if not ran:
        again = "none of it ended so" if asked.rerun else "--rerun runs cases again"
        console.print(f"all of it had results in {out} already; {again}", soft_wrap=True)
    return summary.verdict


def report_sweep(path: Path, since: Path | None, pages: Pages) -> Verdict:
    """Show the sweep in a folder, and what changed since an earlier one in another."""
    summary = summarize(Results(path))
    comparison = None if since is None else compare(summarize(Results(since)), summary)
    show_run(summary, comparison, pages)
    return summary.verdict
