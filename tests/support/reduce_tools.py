"""Cases and problems for the tests of reducing."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from checked_backend.diagnose.reduce.failing_case import FailingCase
from checked_backend.diagnose.reduce.problem import Problem
from checked_backend.findings import Finding, Kind
from checked_backend.options import CheckOptions
from checked_backend.regions.graph_case import GraphCase


def graph_of(function: Callable[..., Any]) -> torch.fx.GraphModule:
    return torch.fx.GraphModule(torch.nn.Module(), torch.fx.symbolic_trace(function).graph)


def case_of(function: Callable[..., Any], *inputs: Any, compiler: Any = "eager", **options: Any) -> GraphCase:
    return GraphCase(graph_of(function), inputs, CheckOptions(compiler=compiler, **options))


def program_of(function: Callable[..., Any], *inputs: Any, subject: str = "output[0]") -> FailingCase:
    return FailingCase.of(case_of(function, *inputs), subject)


def problem_where(wrong: Callable[[GraphCase], bool], program: FailingCase, **further: Any) -> Problem:
    """A problem whose programs count as wrong where a function says so, if eager can run them at all."""

    def oracle(case: GraphCase, _timeout: float) -> tuple[Finding, ...] | None:
        try:
            case.graph(*case.inputs)
        except Exception:
            return None
        found = [Finding(Kind.LOGIC, f"output[{place}]", "wrong") for place in range(8)]
        return tuple(found) if wrong(case) else ()

    return Problem(program, Kind.LOGIC, time.monotonic() + 300, oracle=oracle, **further)


def targets(found: Problem | GraphCase) -> list[str]:
    graph = found.graph if isinstance(found, GraphCase) else found.best.case.graph
    return [str(node.target) for node in graph.graph.nodes if node.op.startswith("call_")]


def count(case: GraphCase) -> int:
    return sum(value.numel() for value in case.inputs if isinstance(value, torch.Tensor))
