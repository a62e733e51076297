"""Which mechanism pays: each is switched off in turn, and the verdicts that change are listed.

``python -m tests.calibration.ablation --resume ablation.jsonl`` runs every n-th calibration case and the programs of
``tests/cases`` that need no C++ compiler. A mechanism without which nothing changes is no reason for its lines; what it
serves may still be a unit test of its own, which the table does not see.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import checked_backend as cb
from checked_backend.checking.program_runner import ProgramRunner
from checked_backend.diagnose.reduce import problem
from checked_backend.modes import float64, monte_carlo
from checked_backend.regions import build, compare_call, observers, region
from checked_backend.regions import compile as compiling
from checked_backend.regions.operator_check.step import OperatorStep
from checked_backend.regions.returned_tensors import ReturnedTensors
from checked_backend.verdict import closing, decide, outliers, thresholds
from checked_backend.verdict.decisions import Decisions
from checked_backend.verdict.runner import Recipe, Runs
from checked_backend.verdict.steps import candidate_again
from tests.cases import Case as Program
from tests.cases.collection import ALL

from .__main__ import cases
from .compilers import candidate
from .families import FAMILIES
from .run import Case, run_case

Switch = Callable[[], AbstractContextManager[Any]]


def _nothing(*_args: Any, **_named: Any) -> None:
    return None


def _false(*_args: Any, **_named: Any) -> bool:
    return False


def _without_step(name: str) -> Switch:
    steps = tuple(step for step in decide.STEPS if step.__name__ != name)
    if len(steps) == len(decide.STEPS):
        raise ValueError(f"there is no step {name}")
    return lambda: mock.patch.object(decide, "STEPS", steps)


def _without_observer(name: str) -> Switch:
    """Switch off one of what a call looks at beside its values: nobody asks what it has seen."""
    tables = {table: getattr(region, table) for table in ("IF_ONE_RAISES", "IF_BOTH_RETURN")}
    rest = {table: tuple(one for one in known if one.__name__ != name) for table, known in tables.items()}
    if rest == tables:
        raise ValueError(f"there is no observer {name}")
    return lambda: mock.patch.multiple(region, **rest)


@contextmanager
def _choices_not_held() -> Iterator[None]:
    run = Runs.run

    with mock.patch.object(Runs, "run", lambda runs, recipe: run(runs, replace(recipe, keeps_choices=False))):
        yield


@contextmanager
def _everything_rounds() -> Iterator[None]:
    with (
        mock.patch.object(monte_carlo, "adds_integers", _false),
        mock.patch.object(monte_carlo, "counts", _false),
        mock.patch.object(monte_carlo, "unrounded", _nothing),
    ):
        yield


@contextmanager
def _no_digits_are_lost() -> Iterator[None]:
    with mock.patch.object(outliers, "lost_digits", _nothing):
        yield


@contextmanager
def _numpy_like_torch() -> Iterator[None]:
    run = ProgramRunner.run

    def ran(runner: ProgramRunner, recipe: Recipe) -> Any:
        runner.program = replace(runner.program, numpy=False)
        return run(runner, recipe)

    with mock.patch.object(ProgramRunner, "run", ran):
        yield


@contextmanager
def _no_operator_check() -> Iterator[None]:
    with (
        mock.patch.object(OperatorStep, "forward", return_value=0),
        mock.patch.object(OperatorStep, "backward", _nothing),
    ):
        yield


def _same_findings(findings: Sequence[Any], *_args: Any, **_named: Any) -> tuple[list[Any], list[Any]]:
    return list(findings), []


@contextmanager
def _no_fused_rounding() -> Iterator[None]:
    with (
        mock.patch.object(candidate_again, "rounds_less_often", _false),
        mock.patch.object(closing, "loses_the_rest", _false),
    ):
        yield


def _mechanisms() -> Mapping[str, Switch]:
    patched = mock.patch.object
    return {
        "choices held": _choices_not_held,
        "shapes that rounding changes": lambda: patched(compare_call, "tolerate_flipped_shapes", _same_findings),
        "fused rounding": _no_fused_rounding,
        "lost digits": _no_digits_are_lost,
        "what rounds nothing": _everything_rounds,
        "grouped products": lambda: patched(float64, "_MEANINGS", {}),
        "powers of negative numbers": lambda: patched(compiling, "powers_called", lambda graph: graph),
        "programs that NumPy computes": _numpy_like_torch,
        "racing writes, in reduction": lambda: patched(problem, "has_race", _false),
        "own noise (Monte Carlo)": _without_step("explain_by_own_noise"),
        "float64 and the twin": _without_step("ask_float64"),
        "what is no rounding": _without_step("close_what_is_no_rounding"),
        "what noise explains": _without_step("close_what_is_explained"),
        "what eager does not repeat": _without_step("close_what_changes"),
        "what is left is wrong": _without_step("close_what_is_left"),
        "eager's repetition": _without_step("repeat_eager"),
        "as good as eager, closer look": _without_step("close_what_is_as_good_as_eager"),
        "the candidate again": _without_step("try_candidate_again"),
        "random numbers explained": lambda: patched(candidate_again, "_explain_by_random_numbers", _nothing),
        "correlated and strong roundings": lambda: patched(thresholds, "MORE_RUNS", 0),
        "each operator by itself": _no_operator_check,
        "signs of zeros": lambda: patched(decide, "zeros_of_another_sign", lambda *_args: iter(())),
        "what goes into draws": lambda: patched(
            compare_call, "compare_draw_inputs", lambda *_args, **_named: Decisions()
        ),
        "settings of the process": _without_observer("_settings"),
        "settings that compiling leaves": lambda: patched(build, "_left_by_compiler", lambda _before: []),
        "inputs that eager leaves alone": _without_observer("_inputs"),
        "writes that are not counted": lambda: patched(observers, "_uncounted_writes", lambda *_args: iter(())),
        "results of earlier calls": _without_observer("_earlier_results"),
        "memory around views": _without_observer("_surroundings"),
        "the random state that is left": _without_observer("_random_state"),
        "gradients of earlier calls": lambda: patched(ReturnedTensors, "sent", lambda *_args: []),
        "gradients that arrive": lambda: patched(compare_call, "_overwritten", lambda *_args: iter(())),
        "results that share memory": lambda: patched(compare_call, "compare_aliasing", lambda *_args: iter(())),
        "kernels as they run": lambda: patched(build, "_kernels", _nothing),
    }


MECHANISMS = _mechanisms()
"""What is switched off, and how."""


def _programs(names: Sequence[str]) -> Iterator[tuple[str, bool, Callable[[], str]]]:
    for program in ALL:
        above = names.__contains__(program.name)
        if program.category == "bug" and not above:
            continue  # of code generation: it needs a C++ compiler
        yield f"cases/{program.name}", program.category == "bug", lambda program=program: _checked(program)


def _checked(program: Program) -> str:
    function, args, kwargs = program.program()
    compiler = "aot_eager" if program.category == "bug" else candidate("everything")
    report = cb.check(function, args, kwargs, compiler=compiler, dynamic=program.dynamic, gradients=program.train)
    return str(report.verdict)


def _calibration(families: Sequence[str], face: str, every: int) -> Iterator[tuple[str, bool, Callable[[], str]]]:
    chosen = list(
        cases(families, ["float32", "bfloat16"], ["inference", "training"], "eager", face, ["clean", "bugs"], 0)
    )
    for case in chosen[::every]:
        yield case.key, bool(case.bug), lambda case=case: _ran(case)


def _ran(case: Case) -> str:
    return run_case(case, effects=False).verdict


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, and print one row for each mechanism."""
    parser = argparse.ArgumentParser(prog="python -m tests.calibration.ablation", description=__doc__)
    parser.add_argument("--mechanisms", nargs="*", default=list(MECHANISMS), choices=list(MECHANISMS), metavar="NAME")
    parser.add_argument("--families", nargs="*", default=list(FAMILIES), choices=list(FAMILIES), metavar="FAMILY")
    parser.add_argument("--face", default="check", choices=["check", "numcheck"])
    parser.add_argument("--every", type=int, default=10, help="run every n-th calibration case only")
    parser.add_argument("--bugs", nargs="*", default=(), help="names of bugs in tests/cases that aot_eager shows")
    parser.add_argument("--resume", type=Path, required=True, help="JSON lines of verdicts, to go on from")
    parser.add_argument("--time-limit", type=float, default=float("inf"), help="seconds after which nothing is begun")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    known: dict[tuple[str, str], str] = {}
    if options.resume.exists():
        for line in options.resume.read_text().splitlines():
            name, key, verdict = json.loads(line)
            known[name, key] = verdict
    programs = _programs(options.bugs) if options.face == "check" else ()
    wanted = [*programs, *_calibration(options.families, options.face, options.every)]
    until = time.monotonic() + options.time_limit
    for name, switch in {"": nullcontext, **{name: MECHANISMS[name] for name in options.mechanisms}}.items():
        for key, _, run in wanted:
            if (name, key) in known or time.monotonic() > until:
                continue
            torch._dynamo.reset()
            try:
                with switch():
                    verdict = run()
            except Exception as error:  # a mechanism that others need
                verdict = f"error: {type(error).__name__}"
            known[name, key] = verdict
            with options.resume.open("a") as file:
                file.write(json.dumps([name, key, verdict]) + "\n")
    print(
        "| without | runs | clean failed | clean not decided | bugs missed | for instance |\n|---|---|---|---|---|---|"
    )
    for name in options.mechanisms:
        print(_row(name, {key: bug for key, bug, _ in wanted}, known))
    return 0


def _row(name: str, bugs: Mapping[str, bool], known: Mapping[tuple[str, str], str]) -> str:
    runs = [key for key in bugs if (name, key) in known and ("", key) in known]
    changed = [key for key in runs if known[name, key] != known["", key]]
    failed = [key for key in changed if not bugs[key] and known[name, key] not in ("pass", "inconclusive")]
    undecided = [key for key in changed if not bugs[key] and known[name, key] == "inconclusive"]
    missed = [key for key in changed if bugs[key] and known["", key] == "fail"]
    return f"| {name} | {len(runs)} | {len(failed)} | {len(undecided)} | {len(missed)} | {', '.join(changed[:3])} |"


if __name__ == "__main__":
    sys.exit(main())
