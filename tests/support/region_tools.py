"""What the tests of the region check share: compile with `numcheck`, gather what it finds, count what it covered."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import Context
from typing import Any

import torch

import checked_backend as cb
from checked_backend.errors import DivergenceWarning
from checked_backend.regions.compile import copy_graph


def checked(function: Callable[..., Any], compiler: Any, *, dynamic: bool | None = None, **options: Any) -> Any:
    """Compile with ``numcheck``; what it finds is recorded, unless an option says otherwise."""
    given = {"compiler": compiler, "on_divergence": "record", "localize": False, **options}
    return torch.compile(function, backend="numcheck", options=given, dynamic=dynamic)


def dynamo_graph(function: Callable[..., Any], *args: Any) -> torch.fx.GraphModule:
    """The graph that Dynamo makes of the beginning of a function."""
    graphs: list[torch.fx.GraphModule] = []

    def keep(gm: torch.fx.GraphModule, _inputs: Any) -> Callable[..., Any]:
        graphs.append(copy_graph(gm))
        return gm.forward

    torch.compile(function, backend=keep)(*args)
    return graphs[0]


def gathered(program: Callable[[], Any]) -> cb.Report:
    """Run a program and return what was found and covered meanwhile."""
    with cb.collect() as session:
        program()
    return session.report


def found(report: cb.Report) -> set[tuple[str, str]]:
    """The findings that fail, as (finer kind, subject)."""
    return {(finding.detail, finding.subject) for finding in report.findings if finding.kind.fails}


def agreed(report: cb.Report, **counts: int) -> cb.Report:
    """The report, if it passed with no finding, nothing left out that matters, and at least these counts."""
    if report.verdict is not cb.Verdict.PASS or report.findings:
        raise AssertionError(str(report))
    for name, number in counts.items():
        assert report.coverage.checked.get(name.replace("_", " "), 0) >= number, (name, report.coverage.checked)
    return report


def calls(report: cb.Report) -> int:
    """How many calls of regions were checked."""
    return sum(region.checked_calls for region in report.coverage.regions)


def backwards(report: cb.Report) -> int:
    """How many backward passes through regions were checked."""
    return sum(region.checked_backwards for region in report.coverage.regions)


def training_state(model: torch.nn.Module) -> list[torch.Tensor]:
    """Parameters, buffers and gradients of a module, and the random state."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [*model.state_dict().values(), *gradients, torch.get_rng_state()]


def same_bits(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    """Whether two lists of tensors are equal bit for bit, and not empty."""
    return len(one) == len(other) > 0 and all(map(torch.equal, one, other))


def warned(program: Callable[[], Any]) -> list[str]:
    """The texts of the package's warnings while a program runs."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        program()
    return [str(one.message) for one in caught if issubclass(one.category, DivergenceWarning)]


def as_the_engine(work: Callable[[], Any]) -> None:
    """Run something as a GPU's gradients are computed: in a thread that knows nothing of the caller's context."""
    raised: list[Exception] = []

    def run() -> None:
        try:
            Context().run(work)
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    for error in raised:
        raise error


@contextmanager
def meanwhile(work: Callable[[], object] | None = None) -> Iterator[None]:
    """In the block another thread is there. It does something again and again, or nothing."""
    done = threading.Event()

    def run() -> None:
        while work is not None and not done.is_set():
            work()
        done.wait()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


Program = Callable[[Callable[..., Any]], Any]
"""Gets the function that compiles; compiles something with it and runs that."""


def audit(program: Program, compiler: Any, **options: Any) -> cb.Report:
    """Run a program, afresh and from the same seed, with everything it compiles checked."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    return gathered(lambda: program(lambda function, **more: checked(function, compiler, **options, **more)))


def clean_reports(program: Program, **options: Any) -> list[cb.Report]:
    """Audit a program with compilers that do nothing wrong; it must agree with each."""
    reports = [audit(program, compiler, **options) for compiler in ("eager", "aot_eager")]
    for report in reports:
        agreed(report)
    return reports
