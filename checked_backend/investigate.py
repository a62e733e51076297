"""What numcheck does after a failure: find the operator, reduce it, write a repro, look for a workaround.

All of it happens in a worker process: it compiles the program many times over, and a compiler that is wrong may also
crash or hang. The user's process waits, and nothing of its state changes.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from checked_backend._torch import inductor_mode_options, without_compile_caches
from checked_backend.errors import CheckedBackendError
from checked_backend.interpret.source import source_line
from checked_backend.localize import Cut, Location, locate
from checked_backend.record import Finding, Kind
from checked_backend.reduce import Repro, Untranslatable, Workaround, find_workaround, keep_out, reduce, write_repro
from checked_backend.reduce.judge import judge_trial
from checked_backend.regions.ambient import RngState
from checked_backend.regions.candidate import resolve_compiler
from checked_backend.regions.failure import Failure
from checked_backend.regions.rehearsal import rehearse
from checked_backend.regions.trial import Trial
from checked_backend.worker import Death, cannot_differentiate_in_worker, cannot_fork, run_in_worker

__all__ = ["Investigation", "investigate"]

log = logging.getLogger(__name__)

TIME_LIMIT = 300.0
"""Seconds after which an investigation is given up."""

TRIAL_LIMIT = 60.0
"""Seconds that one trial may take."""

REDUCTION_LIMIT = 60.0
"""Seconds that reducing may take."""

PATIENCE = 30.0
"""Seconds that an investigation has, once it was interrupted, to say what it has found."""

LEAST_SCRIPT_LIMIT = 30.0
"""Seconds that a script may always take."""

WORKAROUND_LIMIT = 45.0
"""Seconds that looking for a workaround may take."""

_INVESTIGATED = frozenset(Kind) - {Kind.NONDETERMINISTIC, Kind.UNSUPPORTED}


@dataclass(slots=True)
class _Found:
    """What an investigation found out; plain data, because it crosses a process boundary."""

    stage: str | None = None
    graph: str | None = None
    node: str | None = None
    op: str | None = None
    source: str | None = None
    workaround: str | None = None
    repro: str | None = None
    evidence: dict[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Investigation:
    """How to investigate.

    Attributes:
        tell: Told what is being done, in the worker process.
        journal: A file in which programs that were tried are kept, so that a second run continues.
    """

    tell: Callable[[str], None] = log.info
    journal: Path | None = None

    def __call__(self, failure: Failure, findings: Sequence[Finding]) -> Sequence[Finding]:
        """Add to findings where they come from.

        Ctrl-C ends it with the best so far.

        Args:
            failure: The failed call.
            findings: What its check found.

        Returns:
            The findings; those that fail have as much of ``stage``, ``graph``, ``node``, ``op``, ``source``,
            ``workaround`` and ``repro`` as could be found out, and what was tried in their evidence.

        Raises:
            CheckedBackendError: The worker process died, took too long, or was stopped before it had anything.
        """
        if not any(finding.kind in _INVESTIGATED for finding in findings):
            return findings
        work = partial(_work, failure, findings, self)
        # AOT autograd traces forward and backward together
        here = cannot_fork() or cannot_differentiate_in_worker()
        answer = work() if here else run_in_worker(work, timeout=TIME_LIMIT, patience=PATIENCE)
        if isinstance(answer, Death):
            raise CheckedBackendError(f"the process that looked for the operator died: {answer.words}")
        found = _Found(**json.loads(answer))
        return [_enriched(finding, found) if finding.kind in _INVESTIGATED else finding for finding in findings]


def investigate(failure: Failure, findings: Sequence[Finding]) -> Sequence[Finding]:
    """Investigate a failure that nobody waits for: what the backend does. See `Investigation`."""
    log.warning(
        "the compiled program is wrong; looking for the operator takes a minute or two (Ctrl-C ends it, option "
        "localize=False skips it)"
    )
    return Investigation()(failure, findings)


def _work(failure: Failure, findings: Sequence[Finding], how: Investigation) -> str:
    before = RngState.capture(tuple(failure.rng.cuda))  # where no process can be forked, this is the user's
    try:
        with without_compile_caches():
            return json.dumps(asdict(_investigated(failure, findings, how.tell, how.journal)))
    finally:
        before.restore()


def _investigated(
    failure: Failure, findings: Sequence[Finding], tell: Callable[[str], None], journal: Path | None
) -> _Found:
    deadline = time.monotonic() + TIME_LIMIT - PATIENCE
    location = locate(failure, findings, _judge, tell)
    found = _described(location)
    if location.cut is None:
        return found
    evidence = found.evidence = dict(found.evidence or {})
    try:
        reduced = _reduced(location.cut, deadline, tell, evidence, journal)
        repro = _repro(reduced, deadline, failure, found, tell, evidence)
        found.repro = None if repro is None else str(repro.path)
        workaround = _workaround(reduced, deadline, failure, findings, found, tell)
        found.workaround = None if workaround is None else workaround.code
    except KeyboardInterrupt:
        evidence["stopped"] = "by the user"
    except Exception as error:  # the operator is known: what failed after that must not lose it
        evidence["stopped"] = f"{type(error).__name__}: {error}".splitlines()[0]
    return found


def _judge(trial: Trial) -> Sequence[Finding]:
    return [finding for finding in judge_trial(trial, TRIAL_LIMIT) or () if finding.kind.fails]


def _described(location: Location) -> _Found:
    evidence = {}
    if location.message:
        evidence["at the operator"] = location.message
    if location.within:
        evidence["decomposition"] = location.within
    if location.notes:
        evidence["how it was localized"] = "; ".join(location.notes)
    node = location.node
    found = _Found(location.stage, location.graph, evidence=evidence)
    if node is not None:
        found.node, found.op, found.source = node.name, location.op, source_line(node)
    return found


@dataclass(frozen=True, slots=True)
class _Reduced:
    trial: Trial
    subject: str
    kind: Kind


def _reduced(
    cut: Cut, deadline: float, tell: Callable[[str], None], evidence: dict[str, str], journal: Path | None
) -> _Reduced:
    reduction = reduce(
        cut.trial,
        subject=cut.finding.subject,
        kind=cut.finding.kind,
        deadline=min(time.monotonic() + REDUCTION_LIMIT, deadline),
        progress=lambda progress: tell(str(progress)),
        journal=journal,
    )
    if not reduction.shown:
        evidence["reduced"] = "no: it did not show again in a process of its own"
        return _Reduced(cut.trial, cut.finding.subject, cut.finding.kind)
    evidence["reduced"] = f"to {reduction.size}; {reduction.tried} programs tried, {reduction.stopped}"
    return _Reduced(reduction.trial, reduction.subject, reduction.kind)


def _repro(
    reduced: _Reduced,
    deadline: float,
    failure: Failure,
    found: _Found,
    tell: Callable[[str], None],
    evidence: dict[str, str],
) -> Repro | None:
    tell("writing a script and running it in a fresh process")
    name = f"{(found.op or 'region').removeprefix('aten.')}-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}"
    try:
        repro = write_repro(
            reduced.trial,
            failure.options.report_dir,
            name=name,
            subject=reduced.subject,
            kind=reduced.kind,
            source=found.source,
            timeout=max(LEAST_SCRIPT_LIMIT, (deadline - time.monotonic()) / 4),  # it may take four runs
        )
    except (Untranslatable, OSError) as error:
        evidence["repro"] = f"none: {error}"
        return None
    if not repro.confirmed:
        last = (repro.output.strip().splitlines() or ["nothing"])[-1]
        evidence["repro"] = f"the script does not show it in a fresh process; it said: {last}"
    return repro


def _workaround(
    reduced: _Reduced,
    deadline: float,
    failure: Failure,
    findings: Sequence[Finding],
    found: _Found,
    tell: Callable[[str], None],
) -> Workaround | None:
    tell("trying settings")
    workaround = find_workaround(reduced.trial, deadline=min(time.monotonic() + WORKAROUND_LIMIT, deadline))
    if workaround is not None and workaround.setting is not None:
        tell(f"trying {workaround.name} on the whole region")
        options = failure.options
        if failure.mode:
            modal = {**inductor_mode_options(failure.mode), **options.compiler_options}
            options = options.model_copy(update={"compiler_options": modal})
        again = rehearse(failure, resolve_compiler(workaround.setting.on(options)))
        wrong = {finding.subject for finding in findings if finding.kind.fails}
        if not any(finding.kind.fails and finding.subject in wrong for finding in again):
            return workaround
    return None if found.op is None else keep_out(found.op, found.source)


def _enriched(finding: Finding, found: _Found) -> Finding:
    evidence: Mapping[str, Any] = {**finding.evidence, **(found.evidence or {})}
    return replace(
        finding,
        stage=found.stage,
        graph=found.graph,
        node=found.node,
        op=found.op,
        source=found.source or finding.source,
        workaround=found.workaround,
        repro=found.repro,
        evidence=evidence,
    )
