"""The probe in a worker process: a compiler may crash or hang on a graph with so many results."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from torch import fx

from checked_backend.diagnose.localize.probe import FaultyOperator, probe
from checked_backend.errors import CheckedBackendError
from checked_backend.findings import Coverage
from checked_backend.process.worker import Death, cannot_fork, run_in_worker
from checked_backend.regions.compile import Compiler
from checked_backend.report import Report

__all__ = ["probe_isolated"]

PROBE_LIMIT = 120.0
"""Seconds after which the compiler counts as hung."""


def probe_isolated(
    gm: fx.GraphModule, inputs: Sequence[Any], compiler: Compiler, *, limit: int
) -> FaultyOperator | None:
    """Run `probe` in a worker process, if one can be forked. The arguments are the same.

    Raises:
        CheckedBackendError: The probe raised, died or hung.
        Exception: If no process can be forked: whatever the compiler or the graph raises.
    """
    if cannot_fork():
        return probe(gm, inputs, compiler, limit=limit)

    def produce() -> str:
        faulty = probe(gm, inputs, compiler, limit=limit)
        if faulty is None:
            return json.dumps(None)
        return json.dumps([faulty.node.name, Report((faulty.finding,), Coverage(), title="probe").to_json()])

    answer = run_in_worker(produce, timeout=PROBE_LIMIT)
    if isinstance(answer, Death):
        raise CheckedBackendError(f"its process died: {answer.words}")
    told = json.loads(answer)
    if told is None:
        return None
    name, report = told
    [finding] = Report.from_json(report).findings
    return FaultyOperator(next(node for node in gm.graph.nodes if node.name == name), finding)
