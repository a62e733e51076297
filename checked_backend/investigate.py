"""What numcheck does after a failure: find the operator, reduce it, write a repro, look for a workaround.

All of it happens in a worker process: it compiles the program many times over, and a compiler that is wrong may also
crash or hang. The user's process waits, and nothing of its state changes.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from checked_backend._torch import disable_compile_caches
from checked_backend.errors import CheckedBackendError
from checked_backend.interpret.source import source_line
from checked_backend.localize import Location, locate, operator_name
from checked_backend.record import Coverage, Finding, Kind
from checked_backend.regions.failure import Failure
from checked_backend.regions.trial import Trial
from checked_backend.report import Report
from checked_backend.worker import Death, cannot_fork, run_in_worker

__all__ = ["investigate"]

log = logging.getLogger(__name__)

TIME_LIMIT = 240.0
"""Seconds that an investigation may take."""

TRIAL_LIMIT = 60.0
"""Seconds that one trial may take."""

_INVESTIGATED = frozenset(Kind) - {Kind.NONDETERMINISTIC, Kind.UNSUPPORTED, Kind.EXCEPTION}


def investigate(failure: Failure, findings: Sequence[Finding]) -> Sequence[Finding]:
    """Add to findings where they come from.

    Args:
        failure: The failed call.
        findings: What its check found.

    Returns:
        The findings; those that fail have as much of ``stage``, ``graph``, ``node``, ``op``, ``source``,
        ``workaround`` and ``repro`` as could be found out, and what was tried in their evidence.
    """
    if not any(finding.kind in _INVESTIGATED for finding in findings):
        return findings
    work = partial(_work, failure, findings)
    why = cannot_fork()
    if why is not None:
        found = json.loads(work())
    else:
        answer = run_in_worker(work, timeout=TIME_LIMIT)
        if isinstance(answer, Death):
            raise CheckedBackendError(f"the process that looked for the operator died: {answer.words}")
        found = json.loads(answer)
    return [_enriched(finding, found) if finding.kind in _INVESTIGATED else finding for finding in findings]


def _work(failure: Failure, findings: Sequence[Finding]) -> str:
    disable_compile_caches()
    location = locate(failure, findings, judge_trial, log.info)
    return json.dumps(_described(location))


def judge_trial(trial: Trial) -> Sequence[Finding]:
    """Try a trial in a worker of its own.

    Returns:
        Its findings that fail. A trial that fails in eager, or takes too long, is none.
    """
    if cannot_fork() is not None:
        try:
            return [finding for finding in trial.findings() if finding.kind.fails]
        except Exception as error:  # of the trial's graph in eager: it is none
            log.debug("trial failed: %s", error)
            return []
    try:
        answer = run_in_worker(lambda: Report(trial.findings(), Coverage(), "trial").to_json(), timeout=TRIAL_LIMIT)
    except CheckedBackendError as error:
        log.debug("trial failed: %s", error)
        return []
    if isinstance(answer, Death):
        return [Finding(kind=Kind.CRASH, detail=answer.detail, subject="candidate", message=answer.words)]
    return [finding for finding in Report.from_json(answer).findings if finding.kind.fails]


def _described(location: Location) -> dict[str, Any]:
    node = location.node
    return {
        "stage": location.stage,
        "graph": location.graph,
        "node": None if node is None else node.name,
        "op": None if node is None else operator_name(node),
        "source": None if node is None else source_line(node),
        "message": location.message,
        "notes": list(location.notes),
    }


def _enriched(finding: Finding, found: Mapping[str, Any]) -> Finding:
    evidence = dict(finding.evidence)
    if found["message"]:
        evidence["at the operator"] = found["message"]
    if found["notes"]:
        evidence["how it was localized"] = "; ".join(found["notes"])
    return replace(
        finding,
        stage=found["stage"],
        graph=found["graph"],
        node=found["node"],
        op=found["op"],
        source=found["source"] or finding.source,
        evidence=evidence,
    )
