"""Investigate a failure for numcheck: find the operator, reduce it, write a repro, look for a workaround.

All of this happens in a worker process, if one can be forked: the program is compiled many times, and a wrong compiler
may also crash or hang. The user's process waits, and its state does not change.
"""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from checked_backend._torch.caches import without_compile_caches
from checked_backend.diagnose.bug_report import describe_candidate, write_bug_report
from checked_backend.diagnose.diagnosis import DIAGNOSED, Checkpoint, Diagnosis
from checked_backend.diagnose.localize import Cut, Location, locate
from checked_backend.diagnose.localize.flow import FLOW_LIMIT
from checked_backend.diagnose.localize.kernel import KERNEL_LIMIT, generated_kernel
from checked_backend.diagnose.localize.traced import wrong_metadata
from checked_backend.diagnose.oracle import Oracle, exception_oracle, gross_error_oracle, verdict_oracle
from checked_backend.diagnose.reduce import reduce
from checked_backend.diagnose.repro import Repro, Untranslatable, write_repro
from checked_backend.diagnose.workaround.search import WorkaroundSearch
from checked_backend.diagnose.workaround.settings import Workaround
from checked_backend.errors import CheckedBackendError
from checked_backend.findings import EvidenceKey, Finding, Kernel, Kind, NodeError
from checked_backend.process.interrupt import Interruption
from checked_backend.process.worker import Death, cannot_differentiate_in_worker, cannot_fork, run_in_worker
from checked_backend.regions.failure import Failure
from checked_backend.regions.graph_case import GraphCase
from checked_backend.regions.torch_state import RngState
from checked_backend.report.file_names import this_moment
from checked_backend.report.progress import Progress
from checked_backend.report.session import investigations

__all__ = ["Investigation", "investigate"]

log = logging.getLogger(__name__)

TIME_LIMIT = 315.0
"""Seconds after which an investigation is given up."""

CASE_LIMIT = 60.0
"""Seconds that the oracle may take for one case."""

REDUCTION_LIMIT = 60.0
"""Seconds that reducing may take."""

PATIENCE = 45.0
"""Seconds that an interrupted investigation has to tell what it has found."""

TELLING = 5.0
"""Seconds that are left for that at the end."""

LEAST_SCRIPT_LIMIT = 30.0
"""Seconds that a script may always take."""

INTERRUPTED_SCRIPT_LIMIT = 15.0
"""Seconds that a script may take after Ctrl-C."""


@dataclass(frozen=True, slots=True)
class _Context:
    """The helpers of one investigation.

    Attributes:
        tell: Called with each step as it begins. It adds the time left, and raises a Ctrl-C that was lost.
        say: Like `tell`, without the time.
        deadline: A `time.monotonic` moment after which nothing more is begun.
    """

    checkpoint: Checkpoint
    tell: Callable[[str], None]
    say: Callable[[str], None]
    stop: Interruption
    deadline: float
    suspects: Collection[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Investigation:
    """How to investigate.

    Attributes:
        tell: Called with each step as it begins, in the worker process.
    """

    tell: Callable[[str], None] = log.info

    def __call__(self, failure: Failure, findings: Sequence[Finding]) -> Sequence[Finding]:
        """Find out where findings come from, and add that to them.

        Ctrl-C ends the investigation with the best result so far.

        Returns:
            The findings. Those that fail have as much of ``stage``, ``graph``, ``node``, ``op``, ``source``,
            ``workaround`` and ``repro`` as could be found out, and the steps that were tried in their evidence.

        Raises:
            CheckedBackendError: The worker process died, took too long, or was stopped before it had anything.
        """
        if not any(finding.kind in DIAGNOSED for finding in findings):
            return findings
        # AOT autograd traces forward and backward together
        here = cannot_fork() or cannot_differentiate_in_worker()
        with tempfile.TemporaryDirectory(prefix="checked_backend_") as folder:
            checkpoint = Checkpoint(
                Path(folder) / "found.json", lambda found: failure.keep(found.added_to_all(findings))
            )
            causes = investigations().causes
            work = partial(_work, failure, findings, self, checkpoint, frozenset(causes))
            limit, patience = _limits(failure)
            answer = work() if here else run_in_worker(work, timeout=limit, patience=patience)
            found = checkpoint.after(answer) if isinstance(answer, Death) else Diagnosis.from_json(answer)
        if found.op is not None and found.stage is not None:
            causes.add((found.op, found.stage))
        _write_bug_report(failure, findings, found)
        return found.added_to_all(findings)


def _limits(failure: Failure) -> tuple[float, float]:
    """Seconds for the whole investigation, and those of them that are kept for telling what it has found."""
    limit = TIME_LIMIT if failure.patience is None else min(TIME_LIMIT, failure.patience)
    return limit, min(PATIENCE, limit / 4)


def investigate(failure: Failure, findings: Sequence[Finding]) -> Sequence[Finding]:
    """Investigate a failure for the backend, whose user did not ask for it now. See `Investigation`."""
    log.log(
        logging.WARNING if failure.options.progress else logging.INFO,
        "the compiled program is wrong; looking for the operator takes a minute or two (Ctrl-C ends it, option "
        "localize=False skips it)",
    )
    if not failure.options.progress:
        return Investigation()(failure, findings)
    progress = Progress()
    try:
        return Investigation(progress)(failure, findings)
    finally:
        progress.end()


def _work(
    failure: Failure,
    findings: Sequence[Finding],
    how: Investigation,
    checkpoint: Checkpoint,
    suspects: Collection[tuple[str, str]],
) -> str:
    limit, patience = _limits(failure)
    deadline = time.monotonic() + limit - patience
    seconds = limit - min(TELLING, patience / 2)
    end = time.monotonic() + seconds
    stop = Interruption()

    def say(text: str) -> None:
        stop.check()
        how.tell(text)

    def tell(text: str) -> None:
        say(f"{text}, at most {max(0.0, end - time.monotonic()):.0f} s left")

    before = RngState.capture(tuple(failure.rng.cuda))  # if no process can be forked, this is the user's state
    try:
        with without_compile_caches(), stop.awaited(seconds):
            context = _Context(checkpoint, tell, say, stop, deadline, suspects)
            return _investigated(failure, findings, context).to_json()
    finally:
        before.restore()


def _investigated(failure: Failure, findings: Sequence[Finding], context: _Context) -> Diagnosis:
    traced = wrong_metadata(failure, findings)
    if traced is not None:
        return Diagnosis.of_traced(traced)
    last = Diagnosis(evidence={EvidenceKey.LOCALIZATION: "no stage was found to be wrong yet"})

    def known(location: Location) -> None:
        nonlocal last
        last = Diagnosis.of(location)
        context.checkpoint.note(last)

    too_slow = 0

    def oracle(case: GraphCase) -> Sequence[Finding]:
        nonlocal too_slow
        context.stop.check()
        found = [finding for finding in verdict_oracle(case, CASE_LIMIT) or () if finding.kind.fails]
        too_slow += any(finding.detail == "crash.hang" for finding in found)
        return found

    def gross_errors(case: GraphCase) -> Sequence[Finding]:
        context.stop.check()
        return gross_error_oracle(case, CASE_LIMIT) or ()

    try:
        location = locate(
            failure,
            findings,
            oracle,
            context.tell,
            gross=gross_errors,
            known=known,
            suspects=context.suspects,
        )
    except KeyboardInterrupt:
        last.evidence[EvidenceKey.STOPPED] = context.stop.why
        return _with_unjudged(last, too_slow)
    known(location)
    found = _with_unjudged(Diagnosis.of(location), too_slow)
    search = _Search(failure, findings, location, found, context)
    try:
        for reached in search.steps():
            context.checkpoint.note(reached)
    except KeyboardInterrupt:
        found.evidence[EvidenceKey.STOPPED] = context.stop.why
    except Exception as error:  # the operator is known; a later failure must not lose it
        found.evidence[EvidenceKey.STOPPED] = f"{type(error).__name__}: {error}".splitlines()[0]
    return found


def _with_unjudged(found: Diagnosis, too_slow: int) -> Diagnosis:
    """A diagnosis that says how many programs could not be judged: what is found right may be wrong in them."""
    if too_slow:
        before = found.evidence.get(EvidenceKey.LOCALIZATION, "")
        note = f"{too_slow} of the parts that were tried took longer than {CASE_LIMIT:g} s and could not be judged"
        found.evidence[EvidenceKey.LOCALIZATION] = f"{before}; {note}" if before else note
    return found


@dataclass(frozen=True, slots=True)
class _Reduced:
    case: GraphCase
    subject: str
    kind: Kind
    interrupted: bool = False


@dataclass(frozen=True, slots=True)
class _Search:
    """The steps after the operator is known: reduce, write a script, look for a workaround."""

    failure: Failure
    findings: Sequence[Finding]
    location: Location
    found: Diagnosis
    context: _Context

    @property
    def evidence(self) -> dict[str, str]:
        """The steps that were tried, for people."""
        return self.found.evidence

    def steps(self) -> Iterator[Diagnosis]:
        """Do the steps. The diagnosis so far is given after each of them."""
        if self.location.again:
            self.evidence[EvidenceKey.REPRO] = "see the other region, in which this operator was found first"
            yield self.found
            return
        reduced = None
        if self.location.cut is None:
            self.evidence[EvidenceKey.REPRO] = "none: no part of the region was found to be wrong by itself"
        else:
            reduced = self._reduced(self.location.cut)
            yield self.found
            repro = self._repro(reduced)
            if repro is not None:
                self.found.repro, self.found.output = str(repro.path), repro.output
                self.found.repro_confirmed = repro.confirmed
        yield self.found
        if reduced is not None and reduced.interrupted:
            self.evidence[EvidenceKey.SETTINGS] = f"not tried: stopped {self.context.stop.why}"
            self.evidence[EvidenceKey.STOPPED] = self.context.stop.why
            return
        workaround = self._workaround(reduced)
        self.found.workaround = None if workaround is None else workaround.code
        yield self.found
        self.found.flow = [asdict(one) for one in self._flow()]
        yield self.found
        kernel = self._kernel()
        self.found.kernel = None if kernel is None else asdict(kernel)
        yield self.found

    def _flow(self) -> Sequence[NodeError]:
        if self.location.flow is None or time.monotonic() + FLOW_LIMIT > self.context.deadline:
            return ()
        self.context.tell("measuring how the error goes on through the graph")
        try:
            return self.location.flow()
        except Exception as error:  # a report without this picture says the same
            log.debug("no flow: %s", error)
            return ()

    def _kernel(self) -> Kernel | None:
        """The generated code of the operator. Where there is none, the evidence says why."""
        why, found = "", None
        graph, node = self.location.graph, self.location.node
        if self.failure.options.compiler != "inductor":
            why = "only Inductor hands out the code that it generates"
        elif self.location.stage != "compiled":
            why = f"the error is made before code is generated, at the stage {self.location.stage}"
        elif graph is None or node is None:
            why = "no operator was named"
        elif time.monotonic() + KERNEL_LIMIT > self.context.deadline:
            why = "no time was left to compile the region again"
        else:
            self.context.tell("compiling the region once more, for the generated code of the operator")
            try:
                found = generated_kernel(self.failure, graph, node.name)
            except Exception as error:  # a report without it says the same
                said = str(error) if isinstance(error, CheckedBackendError) else f"{type(error).__name__}: {error}"
                why = (said.splitlines() or ["?"])[0]
        if why:
            self.evidence[EvidenceKey.GENERATED_CODE] = f"none: {why}"
        return found

    @property
    def _oracle(self) -> Oracle:
        return gross_error_oracle if self.location.gross else verdict_oracle

    def _reduced(self, cut: Cut) -> _Reduced:
        whole = _Reduced(cut.case, cut.finding.subject, cut.finding.kind)
        if cut.case.cotangents is not None:
            self.evidence[EvidenceKey.REDUCED] = "no: only programs without gradients are reduced"
            return whole
        reduction = reduce(
            cut.case,
            subject=cut.finding.subject,
            kind=cut.finding.kind,
            deadline=min(time.monotonic() + REDUCTION_LIMIT, self.context.deadline),
            progress=lambda progress: self.context.say(f"making it smaller: {progress}"),
            oracle=exception_oracle if cut.finding.kind is Kind.EXCEPTION else self._oracle,
        )
        stopped = reduction.stopped == "interrupted"
        if stopped:
            self.context.stop.heard()
            self.context.say("stopped: writing down the best so far; Ctrl-C again ends it at once")
        if not reduction.shown and not stopped:
            self.evidence[EvidenceKey.REDUCED] = "no: it did not show again in a process of its own"
            return whole
        self.evidence[EvidenceKey.REDUCED] = (
            f"to {reduction.size}; {reduction.tried} program{'s' * (reduction.tried != 1)} tried, {reduction.stopped}"
        )
        return _Reduced(reduction.case, reduction.subject, reduction.kind, stopped)

    def _repro(self, reduced: _Reduced) -> Repro | None:
        cut = self.location.cut
        if reduced.case.cotangents is not None:
            self.evidence[EvidenceKey.REPRO] = "none: a script of a part with its gradients is not written"
            return None
        self.context.tell("writing a script and running it in a fresh process")
        name = f"{(self.found.op or 'region').removeprefix('aten.')}-{this_moment()}"
        try:
            repro = write_repro(
                reduced.case,
                self.failure.options.report_dir,
                name=name,
                subject=reduced.subject,
                kind=reduced.kind,
                source=self.found.source,
                timeout=INTERRUPTED_SCRIPT_LIMIT if reduced.interrupted else self._script_limit,
                oracle=self._oracle,
                known=cut.finding if cut is not None and reduced.kind is Kind.EXCEPTION else None,
            )
        except (Untranslatable, OSError) as error:
            self.evidence[EvidenceKey.REPRO] = f"none: {error}"
            return None
        if not repro.confirmed:
            last = (repro.output.strip().splitlines() or ["nothing"])[-1]
            self.evidence[EvidenceKey.REPRO] = f"the script does not show it in a fresh process; it said: {last}"
        return repro

    @property
    def _script_limit(self) -> float:
        return max(LEAST_SCRIPT_LIMIT, (self.context.deadline - time.monotonic()) / 2)  # it may take two runs

    def _workaround(self, reduced: _Reduced | None) -> Workaround | None:
        oracle, tell = self._oracle, self.context.tell
        search = WorkaroundSearch(self.failure, self.findings, oracle, self.context.deadline, tell, self.evidence)
        op = None if self.location.node is None else self.found.op
        # if eager raises, there are no results to compare the small program with
        case = None if reduced is None or reduced.kind is Kind.EXCEPTION else reduced.case
        found = search.first(case, op, self.found.source)
        self.found.workaround_confirmed = found is not None or not search.in_vain
        return found


def _write_bug_report(failure: Failure, findings: Sequence[Finding], found: Diagnosis) -> None:
    worst = next(finding for finding in findings if finding.kind in DIAGNOSED)
    try:
        candidate = describe_candidate(failure.options, failure.mode)
        path = write_bug_report(found.added_to(worst), candidate, found.output)
    except OSError as error:  # the findings say the same
        log.warning("no bug report: %s", error)
        return
    if path is not None:
        found.evidence[EvidenceKey.BUG_REPORT] = str(path)
