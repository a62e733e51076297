"""What a check looks at before the candidate runs and once more after it, beside the values that it compares.

Each observer gives suspicions. They are confirmed in one way: what eager does too is nothing; what the compiled program
does when it runs again is a finding; where it does not, and somebody else may have done it, nothing can be said.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import ClassVar

from checked_backend.findings import Finding, Kind, Skip
from checked_backend.numerics.fingerprint import fingerprints
from checked_backend.regions.call_findings import rng_state_differs, unexpected_mutation
from checked_backend.regions.call_record import CallRecord
from checked_backend.regions.execution import Execution
from checked_backend.regions.process_state import ProcessState, check_settings
from checked_backend.regions.surrounding_memory import SurroundingMemory, surroundings_changed
from checked_backend.regions.write_counts import WriteCounts, uncounted_writes

__all__ = ["OBSERVERS", "Observer", "Suspicion", "confirmed"]


@dataclass(frozen=True, slots=True)
class Suspicion:
    """A change that the candidate seems to have made.

    Attributes:
        finding: The finding, if it is confirmed.
        by_eager: Says whether eager makes it too; None if that is known not to be.
        again: Says whether the compiled program makes it when it runs again; None if nobody else can have made it.
        doubt: Why nothing can be said, if the compiled program does not.
    """

    finding: Finding
    by_eager: Callable[[], bool] | None = None
    again: Callable[[], bool] | None = None
    doubt: Skip | None = None


def confirmed(
    suspicions: Iterable[Suspicion], findings: Iterable[Finding], skip: Callable[[Skip], None]
) -> Iterator[Finding]:
    """The suspicions that are findings.

    Args:
        findings: Those of the values. Other random numbers explain another random state.
        skip: Receives those of which nothing can be said.
    """
    draws_otherwise = any(finding.kind is Kind.RNG for finding in findings)
    for suspicion in suspicions:
        finding = suspicion.finding
        if finding.kind is Kind.RNG and draws_otherwise:
            continue
        try:
            if suspicion.by_eager is not None and suspicion.by_eager():
                continue
            if suspicion.again is None or suspicion.again():
                yield finding
            elif suspicion.doubt is not None:
                skip(suspicion.doubt)
        except Exception as error:  # a run that fails here only was disturbed too
            skip(Skip(finding.subject, f"could not be compared again: {error}".splitlines()[0], matters=True))


class Observer(ABC):
    """Looks at something when it is made, before the candidate runs.

    Attributes:
        of_exceptions: Whether it is asked where a side raises, too.
    """

    of_exceptions: ClassVar[bool] = False

    @abstractmethod
    def __init__(self, record: CallRecord) -> None: ...

    @abstractmethod
    def after(self, record: CallRecord, skip: Callable[[Skip], None]) -> Iterable[Suspicion]:
        """Look again, after both sides have run. `skip` receives what cannot be looked at."""


class _Settings(Observer):
    """The settings of the process. They are set to eager's at once, or the program would go on with others."""

    of_exceptions = True

    def __init__(self, record: CallRecord) -> None:
        self._before = ProcessState.capture()

    def after(self, record: CallRecord, skip: Callable[[Skip], None]) -> Iterable[Suspicion]:
        eager = record.eager_settings
        findings = check_settings(
            self._before,
            self._before if eager is None else self._before.moved(*eager),
            record.settings or ProcessState.capture(),
            again=lambda: record.controls().rerun_candidate(),
            skip=skip,
            others_ran=record.threads.active_since(),
            ran=isinstance(record.reference, Execution),
        )
        return map(Suspicion, findings)


class _EarlierResults(Observer):
    """Results of earlier calls that the program holds."""

    def __init__(self, record: CallRecord) -> None:
        self._before = record.earlier.look(record.args)

    def after(self, record: CallRecord, skip: Callable[[Skip], None]) -> Iterable[Suspicion]:
        outputs = record.reference.outputs if isinstance(record.reference, Execution) else ()
        call, region = record.call.number, record.earlier.region
        return map(Suspicion, self._before.overwritten(call, region, record.returned, outputs))


class _Inputs(Observer):
    """Inputs that eager leaves alone, and the counts of writes to the others.

    Of AOT autograd's graphs nothing is counted, since their caller counts.
    """

    def __init__(self, record: CallRecord) -> None:
        self._before = record.call.inputs.fingerprints(record.args)
        self._writes = WriteCounts.of(record.args if record.info.graph is None else ())

    def after(self, record: CallRecord, skip: Callable[[Skip], None]) -> Iterable[Suspicion]:
        inputs, subjects, args = record.call.inputs, record.call.subjects, record.args
        now = fingerprints([args[place] for place in self._before])
        changed = [place for (place, value), new in zip(self._before.items(), now, strict=True) if new != value]
        findings = unexpected_mutation([subjects.mutated(place) for place in changed])
        if isinstance(record.reference, Execution):
            findings += uncounted_writes(
                {place: subjects.mutated(place) for place in inputs.mutated},
                inputs.pristine,
                (record.reference.arguments, record.reference.counted),
                (args, self._writes),
            )
        return map(Suspicion, findings)


class _Surroundings(Observer):
    """Memory around views, and gradients. Another thread's backward pass may add to these."""

    def __init__(self, record: CallRecord) -> None:
        self._before = SurroundingMemory.of(record.args, gradients=not record.info.accumulates)

    def after(self, record: CallRecord, skip: Callable[[Skip], None]) -> Iterable[Suspicion]:
        changed = self._before.changed(record.args)
        if not changed:
            return
        runs, subjects = record.controls(), record.call.subjects
        by_eager = cache(partial(self._before.changed_by, runs.run_on, record.args, record.call.inputs))
        candidate = partial(runs.run_on, region=runs.variants.candidate)
        again = cache(partial(self._before.changed_by, candidate, record.args, record.call.inputs))
        # that a thread ran meanwhile is not always visible at once: its time is told some milliseconds later
        others = threading.active_count() > 1 or record.threads.active_since()
        for what, place in sorted(changed):
            key = what, place
            why = "it was changed meanwhile; another thread ran, and the compiled program alone does not change it"
            yield Suspicion(
                surroundings_changed(what, subjects.mutated(place)),
                by_eager=lambda key=key: key in by_eager(),  # type: ignore[misc]
                again=(lambda key=key: key in again()) if others else None,  # type: ignore[misc]
                doubt=Skip(f"what lies beside {subjects.inputs[place]}", why, matters=what == "beyond"),
            )


class _RandomState(Observer):
    """The states of torch's generators. They are the whole process's: another thread that draws moves them too."""

    def __init__(self, record: CallRecord) -> None:
        """Nothing is to be kept: both sides begin from the state that the record has."""

    def after(self, record: CallRecord, skip: Callable[[Skip], None]) -> Iterable[Suspicion]:
        left = record.call.final_rng_states
        if left is None or left.candidate.same_as(left.reference):
            return
        run_both = cache(lambda: record.controls().random_states())
        alone = threading.active_count() == 1 and not left.others_ran
        yield Suspicion(
            rng_state_differs(),
            by_eager=lambda: not run_both()[0].same_as(left.reference),  # torch.seed, or a thread that draws
            again=None if alone else lambda: left.others_drew(run_both) is None,
            doubt=Skip("rng state", "it differed, not each time, and another thread ran meanwhile, which may draw"),
        )


OBSERVERS: tuple[type[Observer], ...] = (_Settings, _Inputs, _EarlierResults, _Surroundings, _RandomState)
"""Those that are asked at each checked call, in this order."""
