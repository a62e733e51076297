"""Reduce a case: passes in order, again and again until nothing gets smaller."""

from __future__ import annotations

import logging
from collections.abc import Callable

from checked_backend.diagnose.oracle import Oracle, verdict_oracle, warm_up
from checked_backend.diagnose.reduce.failing_case import FailingCase
from checked_backend.diagnose.reduce.passes import details, graph, shapes
from checked_backend.diagnose.reduce.problem import OutOfTime, Problem
from checked_backend.findings import Kind
from checked_backend.regions.graph_case import GraphCase

log = logging.getLogger(__name__)

_Steps = tuple[tuple[str, Callable[[Problem], None]], ...]

_STRUCTURE: _Steps = (
    ("dropping outputs", graph.drop_outputs),
    ("running each call on its own", graph.each_alone),
    ("ending earlier", graph.earlier_output),
    ("replacing calls by recorded values", graph.recorded_calls),
    ("smaller sizes", shapes.shrink_sizes),
    ("leaving calls out", graph.bypass_calls),
    ("leaving optional tensors out", details.drop_optional_tensors),
    ("merging inputs", graph.merge_inputs),
    ("fixed sizes", shapes.make_static),
    ("fewer dimensions", shapes.drop_dimensions),
)

_DETAILS: _Steps = (
    ("common dtypes", details.common_dtypes),
    ("simpler values", details.simplify_values),
    ("rounder arguments", details.round_arguments),
)

_WITHOUT_RESULTS = frozenset([shapes.shrink_sizes, shapes.drop_dimensions, shapes.make_static])
"""Steps to make a program smaller that raises in eager, and so has no values to record."""


def reduce(
    case: GraphCase,
    *,
    subject: str,
    kind: Kind,
    deadline: float,
    progress: Callable[[str], None] = lambda _line: None,
    oracle: Oracle = verdict_oracle,
) -> Problem:
    """Find a small program that goes wrong in the same way: the same kind of finding on the same result.

    Each program is compiled and checked in a worker process with a time limit, without compile caches.

    Returns:
        The problem with the smallest program found, also after the deadline and after Ctrl-C.
    """
    problem = Problem(FailingCase.of(case, subject), kind, deadline, progress=progress, oracle=oracle)
    warm_up(case)
    try:
        problem.shown = problem.is_interesting(problem.best)
        raises, before = kind is Kind.EXCEPTION, None
        structure = tuple(step for step in _STRUCTURE if not raises or step[1] in _WITHOUT_RESULTS)
        while problem.shown and problem.size.structure != before:
            before = problem.size.structure
            _run(structure, problem)
            if problem.size.structure == before:  # details are cheap to simplify once the program is small
                _run(_DETAILS, problem)
    except OutOfTime:
        problem.stopped = "deadline"
    except KeyboardInterrupt:
        problem.stopped = "interrupted"
    return problem


def _run(steps: _Steps, problem: Problem) -> None:
    for name, run in steps:
        problem.step = name
        try:
            run(problem)
        except OutOfTime:
            raise
        except Exception as error:  # the best so far stays, and other steps may make it smaller
            log.info("%s failed: %s: %s", name, type(error).__name__, error)
