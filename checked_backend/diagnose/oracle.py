"""Check whether a case still goes wrong, in a worker process, so that the compiler may crash or hang."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator

import torch

from checked_backend._torch.caches import without_compile_caches
from checked_backend._torch.inductor import warm_inductor
from checked_backend.errors import CheckedBackendError
from checked_backend.findings import Coverage, Finding, Kind
from checked_backend.graphs.mode_blocks import with_mode_blocks
from checked_backend.process.job import JobEnd
from checked_backend.process.worker import cannot_fork, run_in_worker
from checked_backend.regions.compile import copy_graph, resolve_compiler
from checked_backend.regions.graph_case import GraphCase
from checked_backend.regions.inputs import copy_values
from checked_backend.report import Report

Oracle = Callable[[GraphCase, float], tuple[Finding, ...] | None]
"""Returns the findings about a case within the given seconds; None if eager cannot run it."""


def warm_up(case: GraphCase) -> None:
    """Start Inductor in this process, once, instead of in every worker."""
    if case.options.compiler == "inductor" and not cannot_fork():
        warm_inductor()


def verdict_oracle(case: GraphCase, timeout: float) -> tuple[Finding, ...] | None:
    """Compile a case without caches and compare it with eager. Rounding noise is no finding.

    Returns:
        The findings; None for a program that eager cannot run. The death of the process is a finding of kind
        ``crash``. If no process can be forked, the case runs in this one.
    """
    answer = _answer(case.findings, timeout)
    if isinstance(answer, JobEnd):
        if not _runs_in_eager(case, timeout):
            return None
        message = "the process that compiled and ran the program died"
        return (Finding(Kind.CRASH, "candidate", message, answer.detail, expected="no death", actual=answer.cause),)
    return answer


def find_apart(
    find: Callable[[], Iterable[Finding]], timeout: float, *, here: bool = False
) -> tuple[Finding, ...] | JobEnd:
    """Look for findings in a process of its own; in this one if none can be forked, or if that is asked for.

    Raises:
        CheckedBackendError: The search raised in that process.
    """

    def produce() -> str:
        return Report(tuple(find()), Coverage(), title="case").to_json()

    answer = produce() if here or cannot_fork() else run_in_worker(produce, timeout=timeout)
    return answer if isinstance(answer, JobEnd) else Report.from_json(answer).findings


def _answer(find: Callable[[], Iterable[Finding]], timeout: float) -> tuple[Finding, ...] | JobEnd | None:
    """The same without caches; None if eager raised, because then it is no program."""

    def uncached() -> Iterator[Finding]:
        with without_compile_caches():
            yield from find()

    try:
        return find_apart(uncached, timeout)
    except CheckedBackendError:
        return None


def _runs_in_eager(case: GraphCase, timeout: float) -> bool:
    """Whether a program that killed a process runs in eager. If not, it is no program."""

    def produce() -> str:
        with torch.no_grad():
            case.graph(*copy_values(case.inputs))
        return "it runs"

    try:
        return run_in_worker(produce, timeout=timeout) == "it runs"
    except CheckedBackendError:
        return False


def exception_oracle(case: GraphCase, timeout: float) -> tuple[Finding, ...] | None:
    """Find that eager raises and the compiled program does not: for a case without results in eager."""

    @torch.no_grad()
    def find() -> Iterator[Finding]:
        error = _raised(case.graph, case)
        graph, compiler = with_mode_blocks(copy_graph(case.graph)), resolve_compiler(case.options)
        compiled = torch.compile(graph, backend=compiler, dynamic=case.dynamic, fullgraph=True)
        if error is not None and _raised(compiled, case) is None:
            # the same complaint about other sizes is the same
            first, *_ = re.sub(r"-?[0-9.]+", "N", str(error)).split("\n")
            name = type(error).__name__
            message, expected = f"eager raises {name}: {error}", f"{name}: {first}"
            yield Finding(
                Kind.EXCEPTION, "output[0]", message, "exception.missing", expected=expected, actual="no exception"
            )

    answer = _answer(find, timeout)
    return () if isinstance(answer, JobEnd) else answer


def _raised(function: Callable[..., object], case: GraphCase) -> Exception | None:
    try:
        function(*copy_values(case.inputs))
    except Exception as error:
        return error
    return None
