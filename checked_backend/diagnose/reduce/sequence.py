"""Reduce a case: passes in order, again and again until nothing gets smaller."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from checked_backend.diagnose.oracle import Oracle, verdict_oracle, warm_up
from checked_backend.diagnose.reduce.failing_case import FailingCase
from checked_backend.diagnose.reduce.passes import calls, graph, shapes
from checked_backend.diagnose.reduce.passes.values import simplify_values
from checked_backend.diagnose.reduce.problem import OutOfTime, Problem, Size
from checked_backend.findings import Kind
from checked_backend.regions.graph_case import GraphCase

log = logging.getLogger(__name__)

_Steps = tuple[tuple[str, Callable[[Problem], None]], ...]

_STRUCTURE: _Steps = (
    ("dropping outputs", graph.drop_outputs),
    ("running each call on its own", graph.each_alone),
    ("keeping what is near the output", graph.near_output),
    ("ending earlier", graph.earlier_output),
    ("replacing calls by recorded values", graph.recorded_calls),
    ("smaller sizes", shapes.shrink_sizes),
    ("leaving calls out", graph.bypass_calls),
    ("leaving optional tensors out", calls.drop_optional_tensors),
    ("merging inputs", graph.merge_inputs),
    ("fixed sizes", shapes.make_static),
    ("fewer dimensions", shapes.drop_dimensions),
)

_DETAILS: _Steps = (
    ("common dtypes", calls.common_dtypes),
    ("simpler values", simplify_values),
    ("rounder arguments", calls.round_arguments),
)

_WITHOUT_RESULTS = frozenset([shapes.shrink_sizes, shapes.drop_dimensions, shapes.make_static])
"""Steps to make a program smaller that raises in eager, and so has no values to record."""


@dataclass(frozen=True, slots=True)
class Reduction:
    """The result of a reduction.

    Attributes:
        subject: The name of the wrong result in it. Outputs move when others are dropped.
        shown: Whether the case that was handed in showed the finding in a worker process. If not, ``case`` is that
            case, and nothing was reduced.
        stopped: Why it ended: ``done``, ``deadline`` or ``interrupted`` (Ctrl-C).
    """

    case: GraphCase
    subject: str
    shown: bool
    stopped: Literal["done", "deadline", "interrupted"]
    tried: int
    size: Size


def reduce(
    case: GraphCase,
    *,
    subject: str,
    kind: Kind,
    deadline: float,
    progress: Callable[[str], None] = lambda _line: None,
    oracle: Oracle = verdict_oracle,
) -> Reduction:
    """Find a small program that goes wrong in the same way: the same kind of finding on the same result.

    Each program is compiled and checked in a worker process with a time limit, without compile caches.

    Args:
        deadline: A `time.monotonic` moment; the best until then is returned.
        progress: Called before each program that is tried, with a line for people.

    Returns:
        The smallest program found, also after the deadline and after Ctrl-C.
    """
    program = FailingCase.of(case, subject)
    problem = Problem(program, kind, deadline, progress=progress, oracle=oracle)
    shown = False
    warm_up(case)
    stopped: Literal["done", "deadline", "interrupted"] = "done"
    try:
        shown = problem.is_interesting(program)
        if shown:
            raises = kind is Kind.EXCEPTION
            _to_fixpoint(problem, tuple(step for step in _STRUCTURE if not raises or step[1] in _WITHOUT_RESULTS))
    except OutOfTime:
        stopped = "deadline"
    except KeyboardInterrupt:
        stopped = "interrupted"
    best = problem.best
    return Reduction(best.case, best.subject, shown, stopped, problem.tried, problem.size)


def _to_fixpoint(problem: Problem, structure: _Steps) -> None:
    before = None
    while problem.size.structure != before:
        before = problem.size.structure
        _run(structure, problem)
        if problem.size.structure == before:  # details are cheap to simplify once the program is small
            _run(_DETAILS, problem)


def _run(steps: _Steps, problem: Problem) -> None:
    for name, run in steps:
        problem.step = name
        try:
            run(problem)
        except OutOfTime:
            raise
        except Exception as error:  # the best so far stays, and other steps may make it smaller
            log.info("%s failed: %s: %s", name, type(error).__name__, error)
