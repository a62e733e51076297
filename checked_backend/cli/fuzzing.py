"""The verbs ``fuzz`` and ``selftest``, and the part of ``report`` that shows a fuzz."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from checked_backend.cli.options import (
    AsJson,
    CompilerOptions,
    Html,
    Junit,
    Memory,
    Words,
    compiler_options,
    cores,
    memory_in_bytes,
)
from checked_backend.cli.printing import Pages, complain, print_text, show_run, users_code
from checked_backend.errors import FuzzError
from checked_backend.findings import Verdict
from checked_backend.process.interrupt import terminable
from checked_backend.process.job import JobResources
from checked_backend.report.clean import plural
from checked_backend.report.progress import Progress
from checked_backend.report.write import write_whole
from checked_backend.sweep.plan import resolved_compiler

if TYPE_CHECKING:
    from checked_backend.fuzz.corpus import Corpus
    from checked_backend.runs.summary import Summary

_TIME = re.compile(r"(\d+(?:\.\d+)?)([smh]?)")
_UNSAFE = re.compile(r"[^A-Za-z0-9_]+")
_MOST_SEED = 2**63
_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


def fuzz(
    compiler: Annotated[
        str,
        typer.Option(
            metavar="C",
            help="A backend of torch.compile, FILE.py:NAME, which is run: trust it, or planted:NAME, wrong on purpose.",
        ),
    ] = "inductor",
    compiler_option: CompilerOptions = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Keeps results; a run goes on where it ended.")] = Path(
        "checked_backend_fuzz"
    ),
    time: Annotated[str, typer.Option(metavar="TIME", help="How long: 90s, 10m, 2h.")] = "10m",
    programs: Annotated[int | None, typer.Option(min=1, metavar="N", help="End after so many programs.")] = None,
    jobs: Annotated[int, typer.Option(min=1, metavar="N", help="Processes at a time.")] = 1,
    seed: Annotated[int, typer.Option(metavar="N", help="Another seed gives other programs.")] = 0,
    generator: Annotated[
        str, typer.Option(metavar="G", help="own, or torchfuzz:DIR of a PyTorch checkout, whose code is run: trust it.")
    ] = "own",
    ops: Annotated[
        Words, typer.Option(metavar="NAME", help="Operations that programs must have: add, F.*; may be repeated.")
    ] = None,
    dtype: Annotated[Words, typer.Option(metavar="DTYPE", help="Dtypes of inputs; may be repeated.")] = None,
    training: Annotated[
        bool | None, typer.Option("--training/--inference", help="With or without gradients; default some of each.")
    ] = None,
    dynamic: Annotated[
        bool | None, typer.Option("--dynamic/--static", help="Symbolic sizes or not; default some of each.")
    ] = None,
    longest: Annotated[int, typer.Option(min=1, metavar="N", help="Calls in a program, at most.")] = 8,
    batch: Annotated[int, typer.Option(min=1, metavar="N", help="Programs that share a compile.")] = 8,
    timeout: Annotated[float, typer.Option(min=0.1, metavar="SECONDS", help="For one program, or one batch.")] = 120.0,
    memory: Memory = None,
    localize: Annotated[
        bool, typer.Option("--localize/--no-localize", help="Find the operator of each new group, and reduce it.")
    ] = True,
    against: Annotated[
        list[Path] | None, typer.Option(metavar="DIR", help="What is in there is known; may be repeated.")
    ] = None,
    repros: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write each group's script and issue text there.")
    ] = None,
    html: Html = None,
    junit: Junit = None,
    as_json: AsJson = False,
) -> Verdict:
    """Check a compiler with random programs: confirmed, reduced, and grouped, so that one bug is one row.

    The exit code is 1 if a group is new: in no folder of --against. `checked-backend report DIR` shows it again.
    """
    import_module("torch")
    worker, drive = import_module("checked_backend.fuzz.worker"), import_module("checked_backend.fuzz.drive")
    drawn = import_module("checked_backend.fuzz.generate.draft")
    found = _TIME.fullmatch(time)
    if found is None or float(found[1]) <= 0:
        raise FuzzError(f"--time got {time!r}; expected a number of seconds, or 90s, 10m, 2h")
    seconds = float(found[1]) * _UNITS[found[2]]
    if not -_MOST_SEED <= seed < _MOST_SEED:
        raise FuzzError(f"--seed got {seed}; expected a whole number from -2**63 to 2**63 - 1")
    compiler = resolved_compiler(compiler)  # each process has its own working folder
    with users_code(as_json):
        candidate = import_module("checked_backend.fuzz.examine").compiler_of(compiler)
        import_module("checked_backend.sweep.examine").refuse_unknown(candidate)
    valid = import_module("checked_backend.fuzz.program").DTYPES
    if unknown := [name for name in dtype or () if name not in valid]:
        raise FuzzError(f"--dtype got {unknown[0]!r}; expected {', '.join(valid)}")
    if not import_module("checked_backend.fuzz.generate.make").rules_for(tuple(ops or ())):
        raise FuzzError("--ops names no operation that is known")
    checkout = _checkout(generator, dtype or ())
    opened = import_module("checked_backend.fuzz.corpus").Corpus
    known = {signature for path in against or () for signature in opened(path).signatures()}
    choices = drawn.Choices(tuple(ops or ()), tuple(dtype or ()), training, dynamic, longest)
    options = compiler_options(compiler_option)
    asked = worker.FuzzOptions(
        compiler=compiler,
        options=options,
        choices=choices,
        generator=checkout,
        seed=seed,
        jobs=jobs,
        seconds=seconds,
        programs=programs,
        batch=batch,
        timeout=timeout,
        localize=localize and not compiler.startswith("planted:"),
        scripts=not compiler.startswith("planted:"),
        place=JobResources(memory_in_bytes(memory, jobs), cores(jobs)),
        folder=out.with_name(f"{out.name}_repros"),
    )
    console = Console(stderr=True, markup=False, highlight=False, emoji=False)
    with opened(out, write=True) as corpus:
        corpus.settle({**_settings(compiler, options), "generator": checkout and f"torchfuzz:{checkout}"})
        with import_module("checked_backend.fuzz.report").Progress(corpus, console, known) as progress, terminable():
            drive.run_fuzz(asked, corpus, progress)
            console.print(progress.line(), soft_wrap=True)
        if corpus.left_out():
            console.print(corpus.left_out_words(), soft_wrap=True)
        return _shown(corpus, known, Pages(html, "-" if as_json else None, junit), repros)


def report_fuzz(path: Path, pages: Pages) -> Verdict:
    """Show the fuzz in a folder."""
    return _shown(import_module("checked_backend.fuzz.corpus").Corpus(path), set(), pages)


def selftest(as_json: AsJson = False) -> Verdict:
    """Plant known faults in a compiler on this machine, and say which were caught. No C++ compiler is needed."""
    module = import_module("checked_backend.fuzz.selftest")
    with Progress(on_interrupt="", limit=module.SECONDS).doing("planting faults in a compiler, and checking it"):
        results = module.run_selftest(JobResources(memory_in_bytes(None)))
    print_text(module.render_json(results) if as_json else module.render_text(results))
    return Verdict.PASS if all(result.right for result in results) else Verdict.FAIL


def _shown(corpus: Corpus, known: set[str], pages: Pages, repros: Path | None = None) -> Verdict:
    report = import_module("checked_backend.fuzz.report")
    summary: Summary = report.summarize(corpus, known)
    show_run(summary, None, pages)
    if repros is not None:
        _write_repros(corpus, repros)
        complain(f"wrote the scripts and issue texts of {plural(len(corpus.groups()), 'group')} to {repros}")
    return summary.verdict


def _write_repros(corpus: Corpus, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for group in corpus.groups():
        name = _UNSAFE.sub("_", f"{group.number}_{group.detail}_{group.op}")[:80]
        if group.script:
            write_whole(group.script, folder / f"repro_{name}.py")
        issue = import_module("checked_backend.fuzz.report").render_issue(group, corpus.settings)
        write_whole(issue, folder / f"issue_{name}.md")


def _settings(compiler: str, options: Any) -> dict[str, str]:
    """What results depend on."""
    environment = import_module("checked_backend.report.environment").environment()
    kept = {name: environment[name] for name in ("python", "torch", "checked_backend", "cpu") if name in environment}
    return {"compiler": compiler, "compiler options": repr(sorted(options.items())), **kept}


def _checkout(generator: str, dtypes: Sequence[str]) -> str:
    """The folder of torchfuzz, resolved; empty for this package's own generator."""
    if generator == "own":
        return ""
    kind, _, folder = generator.partition(":")
    if kind != "torchfuzz" or not folder:
        raise FuzzError(f"--generator got {generator!r}; expected own, or torchfuzz:DIR")
    if dtypes:
        raise FuzzError("--dtype is of this package's own generator; torchfuzz chooses its own dtypes")
    return str(import_module("checked_backend.fuzz.generate.torchfuzz").find_torchfuzz(Path(folder)))
