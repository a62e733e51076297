"""Investigate a failure for numcheck: find the operator, reduce it, write a repro, look for a workaround.

All of this happens in a worker process, if one can be forked: the program is compiled many times, and a wrong compiler
may also crash or hang. The user's process waits, and its state does not change.
"""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from checked_backend._torch.caches import without_compile_caches
from checked_backend.diagnose.bug_report import describe_candidate, write_bug_report
from checked_backend.diagnose.diagnosis import DIAGNOSED, Diagnosis
from checked_backend.diagnose.kernel import kernel_code, kernel_in
from checked_backend.diagnose.localize.cut import Cut
from checked_backend.diagnose.localize.locate import Location, WrongKernel, locate, wrong_kernel
from checked_backend.diagnose.localize.traced import wrong_metadata
from checked_backend.diagnose.oracle import Oracle, exception_oracle, verdict_oracle
from checked_backend.diagnose.reduce.sequence import reduce
from checked_backend.diagnose.repro.repro import Repro, write_kernel_repro, write_repro
from checked_backend.diagnose.workaround.search import WorkaroundSearch
from checked_backend.errors import CheckedBackendError
from checked_backend.findings import EvidenceKey, Finding, Kind
from checked_backend.graphs.nodes import origin_of
from checked_backend.process.interrupt import Interruption
from checked_backend.process.job import JobEnd
from checked_backend.process.worker import cannot_differentiate_in_worker, cannot_fork, run_in_worker
from checked_backend.regions.failure import Failure
from checked_backend.regions.graph_case import GraphCase
from checked_backend.regions.operator_check.findings import BY_ITSELF
from checked_backend.regions.operator_check.tensor_checks import Wrong
from checked_backend.report.file_names import this_moment
from checked_backend.report.progress import Progress, nothing_told
from checked_backend.report.session import investigations
from checked_backend.report.write import write_whole
from checked_backend.scripts.values import Untranslatable

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

KERNEL_LIMIT = 30.0
"""Seconds that a script of a kernel may take."""

LEAST_SCRIPT_LIMIT = 30.0
"""Seconds that a script may always take."""

INTERRUPTED_SCRIPT_LIMIT = 15.0
"""Seconds that a script may take after Ctrl-C."""


def investigate(failure: Failure, findings: Sequence[Finding]) -> Sequence[Finding]:
    """Find out where findings come from, and add that to them.

    Ctrl-C ends the investigation with the best result so far.

    Returns:
        The findings. Those that fail have as much of ``stage``, ``graph``, ``node``, ``op``, ``source``,
        ``workaround`` and ``repro`` as could be found out, and the steps that were tried in their evidence.

    Raises:
        CheckedBackendError: The worker process died, took too long, or was stopped before it had anything.
    """
    failing = [finding for finding in findings if finding.kind.fails]
    if failing and all(map(_names_kernel, failing)):
        [shown] = _investigated(failure, failing[:1], "a script of its kernel takes half a minute")
        return [shown if finding is failing[0] else finding for finding in findings]
    return _investigated(failure, findings, "looking for the operator takes a minute or two")


def _investigated(failure: Failure, findings: Sequence[Finding], what: str) -> Sequence[Finding]:
    with nothing_told():
        log.log(
            logging.WARNING if failure.options.progress else logging.INFO,
            f"the compiled program is wrong; {what} (Ctrl-C ends it, option localize=False skips it)",
        )
        if not failure.options.progress:
            return _investigate_apart(failure, findings, log.info)
        progress = Progress(limit=_limits(failure)[0])
        try:
            return _investigate_apart(failure, findings, progress)
        finally:
            progress.end()


def _investigate_apart(failure: Failure, findings: Sequence[Finding], tell: Callable[[str], None]) -> Sequence[Finding]:
    """Investigate in a worker process. What is known is kept on disk, so that it outlives the worker."""
    if not any(finding.kind in DIAGNOSED for finding in findings):
        return findings
    # AOT autograd traces forward and backward together
    here = cannot_fork() or cannot_differentiate_in_worker()
    if not here and torch.get_num_threads() not in (1, os.cpu_count()):
        # such kernels ask for OpenMP's threads by their number, and in a forked process they would wait for ever
        failure = replace(failure, kernels=None)
    causes = investigations().causes
    with tempfile.TemporaryDirectory(prefix="checked_backend_") as folder:
        path = Path(folder) / "found.json"

        def keep(found: Diagnosis) -> None:
            with contextlib.suppress(OSError):  # a full disk does not end the search
                write_whole(found.to_json(), path)
            failure.keep(found.added_to_all(findings))

        work = _Investigation(failure, findings, tell, keep, frozenset(causes)).run
        limit, patience = _limits(failure)
        answer = work() if here else run_in_worker(work, timeout=limit, patience=patience)
        found = _known_at(path, answer) if isinstance(answer, JobEnd) else Diagnosis.from_json(answer)
    if found.op is not None and found.stage is not None:
        causes.add((found.op, found.stage))
    _write_bug_report(failure, findings, found)
    return found.added_to_all(findings)


def _limits(failure: Failure) -> tuple[float, float]:
    """Seconds for the whole investigation, and those of them that are kept for telling what it has found."""
    limit = TIME_LIMIT if failure.patience is None else min(TIME_LIMIT, failure.patience)
    return limit, min(PATIENCE, limit / 4)


def _known_at(path: Path, death: JobEnd) -> Diagnosis:
    """What was known when the worker died; a CheckedBackendError is raised if nothing was."""
    if not path.exists():
        raise CheckedBackendError(f"the process that looked for the operator died: {death.cause}")
    found = Diagnosis.from_json(path.read_text("utf-8"))
    found.evidence[EvidenceKey.STOPPED] = f"the process that looked further {death.words}"
    return found


@dataclass(slots=True)
class _Investigation:
    """The steps of an investigation, in the process that does them.

    Attributes:
        keep: Puts the diagnosis so far on disk.
        suspects: Operators that were found in other regions, each with the stage.
        deadline: A `time.monotonic` moment after which nothing more is begun.
        too_slow: How many cases could not be judged in time.
    """

    failure: Failure
    findings: Sequence[Finding]
    told: Callable[[str], None]
    keep: Callable[[Diagnosis], None]
    suspects: Collection[tuple[str, str]]
    stop: Interruption = field(default_factory=Interruption)
    deadline: float = 0.0
    too_slow: int = 0
    found: Diagnosis = field(default_factory=Diagnosis)

    def run(self) -> str:
        """Investigate. Returns the diagnosis as text."""
        limit, patience = _limits(self.failure)
        seconds = limit - min(TELLING, patience / 2)
        self.deadline = time.monotonic() + limit - patience
        # if no process can be forked, the random state is the user's
        with self.failure.call.undisturbed(), without_compile_caches(), self.stop.awaited(seconds):
            self._run()
        return self.found.to_json()

    def _run(self) -> None:
        if all(map(_names_kernel, self.findings)):
            self._show_kernel(self.findings)
            return
        traced = wrong_metadata(self.failure, self.findings)
        if traced is not None:
            self.found = Diagnosis.of_traced(traced)
            return
        self.found.evidence[EvidenceKey.LOCALIZATION] = "no stage was found to be wrong yet"
        location: Location | None = None
        try:
            location = locate(
                self.failure,
                self.findings,
                self._failing,
                self._say,
                known=self._locate,
            )
        except KeyboardInterrupt:
            self.found.evidence[EvidenceKey.STOPPED] = self.stop.why
        else:
            self._locate(location)
        if self.too_slow:  # what is found right may be wrong in them
            before = self.found.evidence.get(EvidenceKey.LOCALIZATION)
            parts = f"{self.too_slow} of the parts that were tried took longer than {CASE_LIMIT:g} s"
            told = [before] if before else []
            self.found.evidence[EvidenceKey.LOCALIZATION] = "; ".join([*told, f"{parts} and could not be judged"])
        if location is None:
            return
        try:
            self._explain(location)
        except KeyboardInterrupt:
            self.found.evidence[EvidenceKey.STOPPED] = self.stop.why
        except Exception as error:  # the operator is known; a later failure must not lose it
            self.found.evidence[EvidenceKey.STOPPED] = f"{type(error).__name__}: {error}".splitlines()[0]

    def _show_kernel(self, findings: Sequence[Finding]) -> None:
        """Write a script of the kernel that a finding names. Where the graph was wrong before, kernels are right."""
        self.found = Diagnosis.of_known(findings[0])

        def is_named(wrong: Wrong) -> bool:
            origin = origin_of(wrong.node, self.failure.graph)
            return origin is not None and origin.name == findings[0].node

        with contextlib.suppress(KeyboardInterrupt):  # the finding says the same without it
            kernel = wrong_kernel(self.failure, findings, self._say, [], is_named)
            if kernel is not None:
                self.found.stage = "compiled"
                self._find_kernel(Location("compiled", kernel.module.module.kind, kernel.faulty.node))
                self._write_kernel_script(kernel)

    def _say(self, text: str) -> None:
        """Tell of a step as it begins, and raise a Ctrl-C that was lost."""
        self.stop.check()
        self.told(text)

    def _locate(self, location: Location) -> None:
        self.found = Diagnosis.of(location)
        self.keep(self.found)

    def _failing(self, case: GraphCase) -> Sequence[Finding]:
        self.stop.check()
        found = [finding for finding in verdict_oracle(case, CASE_LIMIT) or () if finding.kind.fails]
        self.too_slow += any(finding.detail == "crash.hang" for finding in found)
        return found

    def _explain(self, location: Location) -> None:
        """The steps after the operator is known: reduce, write a script, look for a workaround, an explanation."""
        found = self.found
        if (found.op, found.stage) in self.suspects:
            again = "the operator was found in another region, and is wrong in this one too"
            found.evidence[EvidenceKey.LOCALIZATION] = "; ".join((*location.notes, again))
            found.evidence[EvidenceKey.REPRO] = "see the other region, in which this operator was found first"
            return
        small, interrupted = location.cut, False
        if small is None:
            found.evidence[EvidenceKey.REPRO] = "none: no part of the region was found to be wrong by itself"
        else:
            small, interrupted = self._reduce(location, small)
            self.keep(found)
            self._write_script(location, small, interrupted)
        self.keep(found)
        if location.kernel is not None and not interrupted:
            self._write_kernel_script(location.kernel)
            self.keep(found)
        if interrupted:
            found.evidence[EvidenceKey.SETTINGS] = f"not tried: stopped {self.stop.why}"
            found.evidence[EvidenceKey.STOPPED] = self.stop.why
            return
        self._find_workaround(location, small)
        self.keep(found)
        found.flow = location.error_flow()
        if why := self._find_kernel(location):
            found.evidence[EvidenceKey.GENERATED_CODE] = f"none: {why}"

    def _reduce(self, location: Location, cut: Cut) -> tuple[Cut, bool]:
        """A smaller case, and whether Ctrl-C ended the search for it."""
        evidence, finding = self.found.evidence, cut.finding
        if cut.case.cotangents is not None:
            evidence[EvidenceKey.REDUCED] = "no: only programs without gradients are reduced"
            return cut, False
        reduction = reduce(
            cut.case,
            subject=finding.subject,
            kind=finding.kind,
            deadline=min(time.monotonic() + REDUCTION_LIMIT, self.deadline),
            progress=lambda progress: self._say(f"making it smaller: {progress}"),
            oracle=_oracle_of(cut),
        )
        stopped = reduction.stopped == "interrupted"
        if stopped:
            self.stop.heard()
            self._say("stopped: writing down the best so far; Ctrl-C again ends it at once")
        if not reduction.shown and not stopped:
            evidence[EvidenceKey.REDUCED] = "no: it did not show again in a process of its own"
            return cut, False
        evidence[EvidenceKey.REDUCED] = (
            f"to {reduction.size}; {reduction.tried} program{'s' * (reduction.tried != 1)} tried, {reduction.stopped}"
        )
        return replace(cut, case=reduction.best.case, finding=replace(finding, subject=reduction.best.subject)), stopped

    def _write_script(self, location: Location, small: Cut, interrupted: bool) -> None:
        found, finding = self.found, small.finding
        if small.case.cotangents is not None:
            found.evidence[EvidenceKey.REPRO] = "none: a script of a part with its gradients is not written"
            return
        self._say("writing a script and running it in a fresh process")
        limit = max(LEAST_SCRIPT_LIMIT, (self.deadline - time.monotonic()) / 2)  # it may take two runs
        try:
            repro = write_repro(
                small.case,
                self.failure.options.report_dir,
                name=self._topic(),
                subject=finding.subject,
                kind=finding.kind,
                source=found.source,
                timeout=INTERRUPTED_SCRIPT_LIMIT if interrupted else limit,
                oracle=_oracle_of(small),
            )
        except (Untranslatable, OSError) as error:
            found.evidence[EvidenceKey.REPRO] = f"none: {error}"
            return
        self._announce(repro)

    def _topic(self) -> str:
        return f"{(self.found.op or 'region').removeprefix('aten.')}-{this_moment()}"

    def _write_kernel_script(self, kernel: WrongKernel) -> None:
        """A script of the generated kernel. It is the repro if no part of the region is wrong by itself."""
        found, options = self.found, self.failure.options
        try:
            code = kernel_code(kernel.module, kernel.wrong, options)
            if code is None:
                return
            self._say("writing a script of the kernel, and running it in a fresh process")
            repro = write_kernel_repro(
                code,
                kernel.faulty.finding,
                options.report_dir,
                name=self._topic(),
                source=found.source,
                timeout=min(KERNEL_LIMIT, max(1.0, self.deadline - time.monotonic())),
            )
        except Exception:  # the operator is known without it
            return
        if repro is not None and found.repro is not None and found.repro_confirmed:
            found.evidence[EvidenceKey.ONE_KERNEL] = str(repro.path)
        elif repro is not None:
            self._announce(repro)

    def _announce(self, repro: Repro) -> None:
        found = self.found
        found.repro, found.output, found.repro_confirmed = str(repro.path), repro.output, repro.confirmed
        found.script = repro.path.read_text("utf-8")
        found.evidence.pop(EvidenceKey.REPRO, None)
        if repro.doubt:
            found.evidence[EvidenceKey.REPRO] = repro.doubt

    def _find_workaround(self, location: Location, small: Cut | None) -> None:
        oracle, evidence = _oracle_of(small), self.found.evidence
        search = WorkaroundSearch(
            self.failure, self.findings, oracle, self.deadline, self._say, evidence, location.stage
        )
        op = None if location.node is None else self.found.op
        case = None if small is None else small.case
        self.found.workaround = search.first(case, op, self.found.source)
        self.found.workaround_confirmed = self.found.workaround is not None or not search.in_vain
        self.keep(self.found)
        if case is not None and (part := search.broken_by(case, op)):
            evidence[EvidenceKey.BROKEN_BY] = part

    def _find_kernel(self, location: Location) -> str:
        """Find the generated code of the operator. Returns why there is none."""
        if self.failure.options.compiler != "inductor":
            return "only Inductor shows the code that it generates"
        if location.stage != "compiled":
            return f"the error is made before code is generated, at the stage {location.stage}"
        if location.graph is None or location.node is None:
            return "no operator was named"
        kernels = self.failure.kernels
        try:
            modules = () if kernels is None else kernels.modules
            self.found.kernel = kernel_in(modules, location.graph, location.node.name, self.failure.graph)
        except CheckedBackendError as error:  # a report without it says the same
            return str(error)
        return ""


def _names_kernel(finding: Finding) -> bool:
    """Whether a finding names an operator by the kernel that is wrong by itself."""
    return finding.node is not None and finding.detail in BY_ITSELF


def _oracle_of(cut: Cut | None) -> Oracle:
    return exception_oracle if cut is not None and cut.finding.kind is Kind.EXCEPTION else verdict_oracle


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
