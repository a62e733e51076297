"""Respond to findings: find out where they come from, raise, warn, record or fall back, write the report to disk."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

from checked_backend._torch.traces import CompilePlace
from checked_backend.errors import DivergenceError, DivergenceWarning
from checked_backend.findings import EvidenceKey, Finding, Kind, Severity, Skip
from checked_backend.options import CheckOptions
from checked_backend.random_state import random_untouched
from checked_backend.regions.execution import Call, Cotangents
from checked_backend.regions.failure import Keep, not_localized
from checked_backend.regions.graph_info import GraphInfo
from checked_backend.regions.operator_check.findings import BY_ITSELF
from checked_backend.report import Report
from checked_backend.report.environment import here_and_now
from checked_backend.report.ledger import PassedCalls
from checked_backend.report.peers import EXIT_MESSAGE, PEERS, this_rank
from checked_backend.report.reporter import Reporter, users_stacklevel
from checked_backend.report.session import investigations
from checked_backend.report.write import KeptReport
from checked_backend.verdict.classify import NOT_REPRODUCED

log = logging.getLogger(__name__)

_UNEARNED = "never checked: the run has not earned it (option budget); run it longer, or with a larger budget"
_NO_BACKWARD = "never checked: no backward pass came to a call that was checked (option budget)"

Investigate = Callable[[Call, "Cotangents | None", Sequence[Finding], Keep], Sequence[Finding]]
"""Gets a failed call, the gradients that had arrived if its backward pass failed, the findings, and a function that
keeps the findings so far. Gives back the findings with their origin."""

Search = Callable[[Sequence[Finding], Keep], Sequence[Finding]]

_NOT_ANEW = "not anew: an earlier finding in this region was"

_OUT_OF_STEP = (
    "the program did not get eager's results: compiled, it exchanges tensors in another order than in eager, so other "
    "ranks would wait for what this one does not send"
)

_NOT_YET = "not yet: this was written while the operator was looked for, and the process has not come back to it"

LONG_ENOUGH = 180.0
"""Seconds after which no further operator is looked for in the same session, if nothing raises."""


class RegionReporter(Reporter):
    """Records the checks of one region, and responds to their findings.

    Args:
        investigate: Finds out where findings come from; None if the user does not want that.

    Attributes:
        stopped: Whether the candidate is no longer used, because the user asked to fall back to eager.
        devices: The devices of the tensors of the latest call: ``cuda:0``.
    """

    def __init__(
        self, info: GraphInfo, options: CheckOptions, *, silent: bool = False, investigate: Investigate | None = None
    ) -> None:
        super().__init__(info.region, options)
        self.stopped = False
        self._investigate = investigate
        self._investigated_before = False
        self._graph = info.graph
        self._silent = silent
        self._options = options
        self.devices: frozenset[str] = frozenset()
        self.call = 0
        self._drawn = 0
        self._other_random_numbers: Finding | None = None
        self._place = CompilePlace.now()
        if options.on_divergence == "raise" and not silent:
            EXIT_MESSAGE.prepare(options.report_dir)

    def begin_call(self, number: int, *, drawn: bool = False) -> None:
        """Note that a call is being checked, and whether it was drawn at random."""
        self.call = number
        self._drawn = int(drawn)
        self._add_calls(calls=1, checked=1, drawn=self._drawn)

    def not_checked(self) -> None:
        """Note that the call whose check began was not checked after all."""
        self._add_calls(checked=-1, drawn=-self._drawn)

    def passing(self) -> PassedCalls:
        """A counter of calls that are not checked, for the ledgers of now."""
        reason = {} if self._options.budget is None else {"reason": _UNEARNED}
        return PassedCalls(self._region, self._ledgers(), self, **reason)

    def gradients_wanted(self) -> None:
        """Note that the gradients of a checked call are to be checked too (option ``budget``)."""
        if self._options.budget is None:
            return
        for ledger in self._ledgers():
            ledger.gradients_wanted(self, Skip("gradients", _NO_BACKWARD, matters=True, region=self._region.name))

    def end_backward(self, checked: Mapping[str, int]) -> None:
        """Note that a backward pass was checked."""
        self._add_calls(backwards=1)
        self.count(checked)

    def limits(self, limits: Mapping[str, float], own_precision: Mapping[str, float]) -> None:
        """Note detection limits, and the errors that are hidden at the tensors' own precision."""
        for ledger in self._ledgers():
            ledger.limits(limits, own_precision)

    def captured(self) -> None:
        """Note a call that a CUDA graph captures."""
        why = "a CUDA graph captured them: nothing can be compared meanwhile, and what it replays is not seen"
        self._skip_until_compared(Skip("calls", why), backward=False)

    def skip_until_compared(self, skip: Skip, *, backward: bool) -> None:
        """Note a call that was to be checked, and was not; it matters unless another of the region is.

        Args:
            backward: Whether it is the backward pass that was not.
        """
        if not backward:
            self.not_checked()
        self._skip_until_compared(skip, backward=backward)

    def _skip_until_compared(self, skip: Skip, *, backward: bool) -> None:
        for ledger in self._ledgers():
            ledger.skip_until_compared(replace(skip, region=self._region.name), self, backward=backward)

    def note(self, note: str) -> None:
        """Note a remark that changes no verdict."""
        super().note(f"{self._region.name}: {note}")

    def respond(
        self,
        findings: Sequence[Finding],
        cause: BaseException | None = None,
        call: Call | None = None,
        cotangents: Cotangents | None = None,
        *,
        raises: bool = True,
    ) -> bool:
        """Report findings as the user asked.

        Args:
            cause: The exception that a finding stands for.
            call: The call, if it can be run again to find out where the findings come from.
            cotangents: The gradients that had arrived, if its backward pass failed.
            raises: Whether to raise where the user asked for that; not where eager's own exception will be.

        Returns:
            Whether to hand out eager's results, and to stop using the candidate.

        Raises:
            DivergenceError: With ``on_divergence="raise"``, if a finding fails.
        """
        if call is not None:
            findings, doubts = call.exchanges.proven(findings)
            for skip in doubts:
                self.skip(skip)
        search = None if call is None or not self._investigate else partial(self._investigate, call, cotangents)
        with random_untouched() if findings else nullcontext():
            fall_back = self._report(findings, cause, search, raises=raises)
        if fall_back and call is not None and not call.exchanges.in_step:
            self.note(_OUT_OF_STEP)
        elif fall_back:
            self.stopped = True
        return self.stopped

    def _report(
        self, findings: Sequence[Finding], cause: BaseException | None, search: Search | None, *, raises: bool
    ) -> bool:
        """Answer findings as the user asked. Return whether to fall back to eager.

        Before anybody searches where new ones come from, they are in all ledgers and on disk: a process may not outlive
        that.
        """
        named = [
            replace(
                finding,
                region=self._region.name,
                graph=finding.graph or self._graph,
                ranks=(rank,) if (rank := this_rank()) else (),
                evidence={**finding.evidence, **self._where_and_when(finding)},
            )
            for finding in findings
        ]
        reported, ignored = self._graded(named)
        reported = self._grouped(reported)
        new = self._add(reported, ignored)
        failing = [finding for finding in reported if finding.fails]
        if not failing:
            self._warn_of_layout([finding for finding in new if finding.severity is Severity.WARNING])
            self._tell_unsupported([finding for finding in new if finding.kind is Kind.UNSUPPORTED])
            return False
        ends = self._options.on_divergence == "raise" and raises
        news = any(finding.fails for finding in new)
        report = self._own.report(self._region.name, only=reported)
        if search is not None and news and not all(finding.at_fault for finding in failing):
            report = self._localized(report, reported, search, ends=ends)
        elif not self._silent and (news or self._options.on_divergence == "raise"):
            report = KeptReport(self._options.report_dir).save(report)
            PEERS.announce(report, ends=ends)
        if news:
            self._trace(report)
        if ends:
            raise DivergenceError(report) from cause
        if self._options.on_divergence == "warn" and news:
            warnings.warn(str(report), DivergenceWarning, stacklevel=users_stacklevel())
        return self._options.on_divergence == "fallback"

    def _trace(self, report: Report) -> None:
        """Show a failed check where torch's tools look: beside the region's graphs in its trace, and in the log."""
        self._place.artifact("checked_backend_report", lambda: str(report))
        self._place.artifact("checked_backend_findings", report.to_json, encoding="json")
        log.info("%s", str(report).partition("\n")[0])

    def _where_and_when(self, finding: Finding) -> Mapping[str, object]:
        """On which rank a difference was seen, and in which call; of one that does not repeat also the device.

        Hardware may be at fault for that one.
        """
        rank = this_rank()
        where: dict[str, object] = {EvidenceKey.RANK: rank, EvidenceKey.FIRST_CALL: self.call} if rank else {}
        if finding.detail != NOT_REPRODUCED.detail:
            return where
        return {**where, **here_and_now(self.devices)}

    def hear(self, cause: BaseException | None = None) -> None:
        """Take in what other ranks have found. Call it where this rank can end as well as they do.

        Args:
            cause: The exception that is raised here, perhaps because another rank has ended.

        Raises:
            DivergenceError: Another rank ends its program with a finding, and this one is to end with its findings
                too. It has the other rank's report.
        """
        if self._silent:
            return
        for news in PEERS.news():
            self.note(str(news))
            if news.ends and self._options.on_divergence == "raise":
                notes = (f"this was found by rank {news.rank} on {news.host}", *news.report.coverage.notes)
                coverage = replace(news.report.coverage, notes=notes)
                raise DivergenceError(replace(news.report, coverage=coverage)) from cause

    def _grouped(self, findings: Sequence[Finding]) -> list[Finding]:
        """Name other random numbers once: every result that depends on these differs, in later calls too.

        The first finding ``explains`` the others. Only those whose tensors agree with eager on its random numbers are
        grouped. An error beside them stays a finding.
        """
        streams = [finding for finding in findings if finding.detail == "rng.stream"]
        if not streams:
            return list(findings)
        first = self._other_random_numbers or streams[0]
        others = [finding.subject for finding in streams if finding.subject != first.subject]
        if explained := tuple(dict.fromkeys((*first.explains, *others))):
            first = replace(first, explains=explained, evidence={**first.evidence, EvidenceKey.EXPLAINS: explained})
        self._other_random_numbers = first
        for ledger in self._ledgers():
            ledger.complete([first])
        return [first if one is streams[0] else one for one in findings if one is streams[0] or one not in streams]

    def _tell_unsupported(self, findings: Sequence[Finding]) -> None:
        """Nothing is raised for what is no difference; but a program that runs in eager instead is not passed over."""
        for finding in findings:
            log.warning("checked_backend: %s: %s", finding.region, finding.message)
        if findings and not self._silent:
            KeptReport(self._options.report_dir).save(self._own.report(self._region.name, only=findings))

    def _localized(self, report: Report, reported: Sequence[Finding], search: Search, *, ends: bool) -> Report:
        """Find out where findings come from. The results so far are always on disk."""
        kept = KeptReport(self._options.report_dir)
        errors = [finding for finding in reported if finding.severity is Severity.ERROR]
        warned = [finding for finding in reported if finding.severity is Severity.WARNING]
        saved = kept.save(replace(report, findings=tuple(not_localized(report.findings, _NOT_YET))))
        for ledger in self._ledgers():
            ledger.complete(not_localized(errors, _NOT_YET))
        if not self._silent:
            PEERS.announce(saved, ends=ends)  # the other ranks need not wait for what follows

        # It takes no locks: it is called in forked processes, in which other threads' locks stay locked.
        def keep(known: Sequence[Finding]) -> None:
            kept.progress(replace(report, findings=tuple(not_localized([*known, *warned], _NOT_YET))))

        found = [*self._investigated(errors, search, keep), *warned]
        for ledger in self._ledgers():
            ledger.complete(found, [*errors, *warned])
        return kept.save(self._own.report(self._region.name, only=found))

    def _investigated(self, reported: Sequence[Finding], search: Search, keep: Keep) -> list[Finding]:
        """Investigate each place once, and no more places than a person would wait for."""
        spent = investigations()
        place = (self._region.sources, *sorted({str(finding.kind) for finding in reported if finding.fails}))
        unattended = self._options.on_divergence != "raise"
        if unattended and place in spent.places:
            return not_localized(reported, "not anew: the same kinds of findings of the same lines were")
        if unattended and spent.seconds > LONG_ENOUGH:
            return not_localized(
                reported,
                f"no: {spent.seconds:.0f} s were spent on earlier findings; mend those first, or dump this graph "
                "(option dump) and run checked-backend localize on it",
            )
        begun = time.monotonic()
        try:
            known = all(finding.node is not None for finding in reported if finding.kind.fails)
            has_kernel = self._options.compiler == "inductor" and any(one.detail in BY_ITSELF for one in reported)
            if known and not has_kernel:
                return list(reported)  # the operator is known
            if self._investigated_before:  # this takes long, and later findings mostly follow from the first
                return not_localized(reported, _NOT_ANEW)
            self._investigated_before = not known
            return list(search(reported, keep))
        except Exception as error:  # the verdict stands without it
            self.note(f"could not be localized: {type(error).__name__}: {error}".splitlines()[0])
            return list(reported)
        finally:
            spent.places.add(place)
            spent.seconds += time.monotonic() - begun
