"""At which level a program fails, and what becomes of a compiler that kills the process."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import checked_backend as cb
from tests.support import faults
from tests.support.check_tools import agreed, batch, only, skips
from tests.support.raising import raising


def traced_otherwise(x: torch.Tensor) -> torch.Tensor:
    """A program that Dynamo sees otherwise than eager does."""
    return x * 2.5 if torch.compiler.is_compiling() else x * 2


@pytest.fixture
def traced_wrongly() -> Iterator[Callable[..., Any]]:
    """An operator that AOT autograd, which traces through it, sees otherwise than eager does."""

    with torch.library._scoped_library("cb_levels", "FRAGMENT") as library:
        library.define("double(Tensor x) -> Tensor")
        library.impl("double", lambda x: x * 2 if type(x) is torch.Tensor else x * 2.5, "CompositeImplicitAutograd")
        yield lambda x: torch.ops.cb_levels.double(x)


@pytest.mark.parametrize("compiler", ["eager", "aot_eager", faults.clean("aot")])
def test_dynamos_level(compiler: Any) -> None:
    finding = only(cb.check(traced_otherwise, (batch(4),), compiler=compiler))
    assert (finding.kind, finding.stage) == (cb.Kind.LOGIC, "eager")
    assert "Dynamo" in finding.evidence["level"]


@pytest.mark.parametrize("compiler", ["aot_eager", faults.clean("aot")])
def test_the_level_of_aot_autograd(compiler: Any, traced_wrongly: Callable[..., Any]) -> None:
    finding = only(cb.check(traced_wrongly, (batch(4),), compiler=compiler))
    assert finding.stage == "aot"
    assert "AOT autograd" in finding.evidence["level"]


def test_the_compilers_level() -> None:
    model = torch.nn.Linear(4, 4)
    finding = only(cb.check(model, (batch(2, 4),), compiler=faults.scaled_gradient("weight", "aot")))
    assert finding.stage == "compiled"
    assert "the compiler" in finding.evidence["level"]
    assert "level: the compiler" in cb.check(model, (batch(2, 4),), compiler=faults.wrong_value()).to_text(verbose=True)


def test_a_way_that_only_rounds_otherwise_is_no_wrong_logic() -> None:
    """As torch's optimizers do it: Python's numbers in eager, float32 tensors when compiled."""

    def corrected(x: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling():
            return x / (1 - 0.999**step)
        return x / (1 - 0.999 ** step.item())

    finding = only(cb.check(corrected, (batch(8), torch.tensor(1.0)), compiler="eager"))
    assert (finding.detail, finding.stage) == ("precision.traced", "eager")
    assert "in float64 both agree" in finding.message


def test_a_mutation_that_the_schema_hides_is_no_rounding() -> None:
    with torch.library._scoped_library("cb_levels", "FRAGMENT") as library:
        library.define("hidden(Tensor x) -> Tensor")
        library.impl("hidden", lambda x: x.add_(1).clone(), "CPU")
        library.impl("hidden", torch.empty_like, "Meta")
        finding = only(cb.check(lambda x: torch.ops.cb_levels.hidden(x) * 2, (batch(4),), compiler="aot_eager"))
    assert (finding.kind, finding.subject) == (cb.Kind.MUTATION, "mutated[x]")


def test_findings_of_several_levels_are_told_apart() -> None:
    def both(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if torch.compiler.is_compiling():
            return x.t().contiguous().t() * 1, x.sin()
        return x * 1, x.sin()

    findings = cb.check(both, (batch(3, 4),), compiler=faults.wrong_value(1)).findings
    assert {one.detail: one.stage for one in findings} == {"structure.stride": "eager", "logic": "compiled"}


# a process of its own


def _killing(how: Callable[[], Any]) -> faults.Compiler:
    return faults.every_output(lambda output: (how(), output)[1])


@pytest.mark.forks
@pytest.mark.parametrize(
    ("how", "detail", "words"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGILL), "crash.signal", "killed by SIGILL"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "crash.memory", "killed by SIGKILL (out of memory?)"),
        (lambda: os._exit(3), "crash.exit", "exited with status 3"),
    ],
)
def test_the_death_of_the_process_is_a_finding(how: Callable[[], Any], detail: str, words: str) -> None:
    finding = only(cb.check(lambda x: x * 2, (batch(4),), compiler=_killing(how), isolate=True, timeout=120))
    assert (finding.kind, finding.detail, finding.subject) == (cb.Kind.CRASH, detail, "candidate")
    assert (finding.actual, finding.stage) == (words, "compiled")


@pytest.mark.forks
def test_a_program_that_hangs_is_a_finding() -> None:
    hangs = _killing(lambda: time.sleep(600))
    finding = only(cb.check(lambda x: x * 2, (batch(4),), compiler=hangs, isolate=True, timeout=6))
    assert (finding.detail, finding.actual) == ("crash.hang", "still running after 6 s")
    assert "did not end in time; one that runs it in eager alone does" in finding.message


@pytest.mark.forks
def test_a_check_that_takes_too_long_is_no_finding() -> None:
    """Only what the check itself compiles takes its time: in float64."""

    @faults.runs
    def slow(forward: Callable[..., Any], *args: Any) -> Any:
        if any(isinstance(arg, torch.Tensor) and arg.dtype == torch.float64 for arg in args):
            time.sleep(600)
        return tuple(output * (1 + 1e-7) for output in forward(*args))

    report = cb.check(lambda x: x.exp(), (batch(4),), compiler=slow, isolate=True, timeout=8)
    assert report.verdict is cb.Verdict.INCONCLUSIVE, str(report)
    assert "the compiled program alone, called as given, does" in report.findings[0].message


@pytest.mark.forks
def test_a_program_that_kills_in_eager_too_is_no_failure() -> None:
    report = cb.check(lambda x: os._exit(4), (batch(4),), compiler="eager", isolate=True, timeout=60)
    assert report.verdict is cb.Verdict.INCONCLUSIVE
    assert "so does one that runs the program in eager alone" in " ".join(report.to_text(verbose=True).split())


@pytest.mark.forks
def test_an_isolated_report_is_the_report() -> None:
    model = torch.nn.Linear(4, 4)
    finding = only(cb.check(model, (batch(2, 4),), compiler=faults.scaled_gradient("weight"), isolate=True))
    assert (finding.detail, finding.subject, finding.stage) == ("logic", "grad[weight]", "compiled")
    agreed(cb.check(model, (batch(2, 4),), compiler="eager", isolate=True), gradients=2)


@pytest.mark.forks
def test_exceptions_are_compared_in_isolation_too() -> None:
    report = cb.check(lambda x: x.view(7), (batch(4),), compiler="eager", isolate=True)
    assert (report.verdict, report.findings) == (cb.Verdict.INCONCLUSIVE, ())
    assert "eager itself raises" in skips(report)

    def only_eager(x: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_compiling():
            raise ValueError("only here")
        return x * 2

    assert only(cb.check(only_eager, (batch(4),), compiler="eager", isolate=True)).detail == "exception.missing"


@pytest.mark.parametrize(
    "greedy", [raising(MemoryError("no memory left")), lambda: torch.empty(2**50)], ids=["python", "torch"]
)
def test_running_out_of_memory_is_a_crash(greedy: Callable[[], Any]) -> None:
    finding = only(cb.check(lambda x: x * 2, (batch(4),), compiler=_killing(greedy)))
    assert (finding.kind, finding.detail, finding.stage) == (cb.Kind.CRASH, "crash.memory", "compiled")


@pytest.mark.forks
def test_misuse_in_the_worker_is_the_callers() -> None:
    with pytest.raises(cb.OptionError, match="no parameter and no tensor argument"):
        cb.check(torch.sin, (batch(4),), compiler="eager", optimizer=torch.optim.SGD, isolate=True)


@pytest.mark.slow
@pytest.mark.inductor
def test_a_real_program_that_corrupts_the_heap() -> None:
    """pytorch 2.13: Inductor's code for this writes past the end of its buffer."""
    one, two = torch.rand(37) > 0.5, torch.rand(37) > 0.5
    assert cb.check(lambda a, b: torch.add(a, b, alpha=2), (one, two), isolate=True).verdict is not cb.Verdict.PASS
