"""What a check looks at before the candidate runs and once more after it, beside the values that it compares.

Each observer gives suspicions. They are confirmed in one way: what eager does too is nothing; what the compiled program
does when it runs again is a finding; where it does not, and somebody else may have done it, nothing can be said.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import torch

from checked_backend._torch.autograd import autograd_sequence_number, carry_tangents
from checked_backend._torch.collectives import wait_for_result
from checked_backend.findings import Finding, Kind, Skip
from checked_backend.modes.base import PLAIN
from checked_backend.numerics.fingerprint import fingerprint, fingerprints
from checked_backend.numerics.structure import compare_structure
from checked_backend.random_state import random_untouched
from checked_backend.ranks.exchanges import Exchanges
from checked_backend.ranks.tape import CollectiveReplayError
from checked_backend.regions.backward_check import Checks
from checked_backend.regions.call_findings import memory_written, rng_state_differs
from checked_backend.regions.compare_parts import Part, gradients_lost
from checked_backend.regions.execution import Call, Execution, Subjects
from checked_backend.regions.gradient_gate import input_edges
from checked_backend.regions.graph_info import qualified_names
from checked_backend.regions.inputs import (
    Effects,
    Inputs,
    WriteCounts,
    copy_values,
    find_effects,
    storage_key,
)
from checked_backend.regions.process_state import ProcessState, check_settings
from checked_backend.regions.schedule import TimedCheck
from checked_backend.regions.torch_state import FinalRngStates, RngState, TorchState, other_threads
from checked_backend.scripts.values import span
from checked_backend.verdict.steps.candidate_again import AGAIN


@dataclass(eq=False)
class CallRecord:
    """The record of one checked call.

    Attributes:
        threads: How long each other thread has run before the candidate does.
        edges: The places in the user's autograd graph where the gradients of the inputs arrive.
        since: The autograd sequence number before the candidate runs.
        reference: Eager's execution, or its exception; None before it ran, and after it was freed.
        eager_settings: The settings of the process when eager began, and when it was over.
        settings: The settings of the process as the candidate leaves them, if eager runs after it.
    """

    checks: Checks
    args: Sequence[Any]
    call: Call
    threads: Mapping[int, str]
    edges: Mapping[Any, int]
    since: int
    reference: Execution | Exception | None = None
    eager_settings: tuple[ProcessState, ProcessState] | None = None
    after_reference: RngState = field(init=False)
    after_candidate: RngState = field(init=False)
    settings: ProcessState | None = None
    returned: Any = None
    _observations: Mapping[object, Observation] = field(init=False)

    def observe(self) -> None:
        """Have all observers look, before the candidate runs."""
        own = weakref.proxy(self)  # else what the check holds would not be freed before Python's collector comes by
        self._observations = {observer: observer(own) for observer in (*IF_ONE_RAISES, *IF_BOTH_RETURN)}
        for observation in self._observations.values():
            next(observation)

    def suspicions(self, observers: Sequence[object]) -> Iterator[Suspicion]:
        """What some observers see once the candidate has run, or has raised."""
        for observer in observers:
            yield from filter(None, self._observations[observer])

    def final_rng_states(self) -> FinalRngStates:
        """The random states that both sides left."""
        return FinalRngStates(self.after_reference, self.after_candidate, self.others_ran)

    @property
    def others_ran(self) -> bool:
        """Whether any other thread has run, began or ended since the call began; True if the system does not tell."""
        now = other_threads()
        return now != self.threads or "" in now.values()

    @property
    def not_replayed(self) -> Exception | None:
        """Eager's exception, if it was raised because a tensor from other ranks was missing."""
        if not isinstance(self.reference, Exception):
            return None
        missing = isinstance(self.reference, CollectiveReplayError) or self.call.exchanges.doubtful
        return self.reference if missing else None


class CallRecorder:
    """Begins the records of one region's calls."""

    def __init__(self, checks: Checks) -> None:
        self._checks = checks
        self._info, self._reporter = checks.info, checks.reporter
        self._lock = threading.Lock()
        self._known: tuple[Effects, Subjects] | None = None

    def prepare(self, args: Sequence[Any]) -> RngState:
        """Look at the inputs of a call before its check begins. Returns the random state before the call."""
        try:
            for position in self._info.pending_inputs:  # the values of what has not arrived yet cannot be copied
                wait_for_result(args[position])
        except Exception as error:
            self._reporter.hear(cause=error)
            raise
        self._first_look(args)
        return RngState.for_inputs(args)

    def _first_look(self, args: Sequence[Any]) -> tuple[Effects, Subjects]:
        """Find out at the first call what the region mutates, and what its inputs are called."""
        with self._lock:
            if self._known is None:
                with random_untouched():
                    effects = find_effects(self._checks.variants.reference, args)
                if self._info.mutates_in_backward:
                    effects = replace(effects, mutated=None, reason="its backward pass writes to some")
                    reason = "written to in the backward pass, of which gradients alone are compared"
                    self._reporter.skip(Skip("inputs", reason, matters=True))
                if effects.mutated is None:
                    why = f"which are mutated could not be found out: {effects.reason}"
                    self._reporter.note(f"all inputs are copied, because {why}")
                names = list(self._info.inputs)
                for position, name in qualified_names(args).items():
                    names[position] = name
                self._known = effects, Subjects(tuple(names), self._info.outputs)
            return self._known

    def begin(self, args: Sequence[Any], random: RngState, check: TimedCheck) -> CallRecord:
        """Copy what the check of one call needs. Nothing ran yet."""
        info, (effects, subjects) = self._info, self._first_look(args)
        if carry_tangents(args):
            self._reporter.skip(Skip("tangents of forward-mode AD", "not compared", matters=True))
        call = Call(
            Inputs.capture(args, effects.mutated, gradients=torch.is_grad_enabled() or info.enables_grad),
            TorchState.capture(),
            random,
            subjects,
            check=check,
            exchanges=Exchanges(info.collectives, returns_pending=info.returns_pending_collectives),
            number=self._checks.earlier.calls,
        )
        record = CallRecord(
            self._checks,
            args,
            call,
            other_threads(),
            input_edges(args, call.inputs.requires_grad),
            autograd_sequence_number(),
        )
        record.observe()
        return record


FARTHEST = 4
"""On either side of a view, memory is looked at up to this many times the view's span."""


def _fingerprints_around(args: Sequence[Any]) -> dict[int, int | None]:
    """Checksums of the memory around views among inputs, by the position of the first view of each."""
    groups: dict[int, list[tuple[int, torch.Tensor]]] = {}
    for place, tensor in enumerate(args):
        if type(tensor) in PLAIN and (key := storage_key(tensor)) is not None and tensor.numel():
            groups.setdefault(key, []).append((place, tensor.detach()))
    around = {group[0][0]: _around([tensor for _, tensor in group]) for group in groups.values()}
    return {place: fingerprint(memory) for place, memory in around.items() if memory is not None}


def _changed(before: Mapping[int, int | None], args: Sequence[Any]) -> set[int]:
    now = _fingerprints_around(args)
    return {place for place, known in before.items() if now.get(place, known) != known}


def _changed_by(region: Callable[..., Any], call: Call, args: Sequence[Any], places: Iterable[int]) -> set[int]:
    """The views among the inputs, at these positions, around which a run on copies changes memory.

    Each bit of the memory around them is turned there: what is there now may be what the run would write too.
    """
    given, _ = call.inputs.fresh()
    views = {storage_key(args[place]) for place in places}
    shared = [
        place
        for place, tensor in enumerate(given)
        if type(tensor) in PLAIN and storage_key(tensor) in views and storage_key(tensor) == storage_key(args[place])
    ]
    copies = copy_values([given[place].detach() for place in shared])
    values = [copy.clone() for copy in copies]
    for storage in {storage_key(copy): copy.untyped_storage() for copy in copies}.values():
        torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).bitwise_not_()
    for place, copy, value in zip(shared, copies, values, strict=True):
        given[place] = copy.copy_(value).requires_grad_(given[place].requires_grad)
    before = _fingerprints_around(given)
    call.run(region, given)
    return _changed(before, given)


def _around(views: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The memory around views of one storage, with zeros in place of the views; None if there is none to look at.

    Views in several dtypes are not looked at, nor one of few elements that are far from each other in much memory.
    """
    first = views[0]
    if first.is_quantized or any(view.dtype != first.dtype for view in views):
        return None
    whole = first.untyped_storage().nbytes() // first.element_size()
    starts = [view.storage_offset() for view in views]
    ends = [start + span(view) for start, view in zip(starts, views, strict=True)]
    reach, size = FARTHEST * max(map(span, views)), sum(view.numel() for view in views)
    start, end = max(0, min(starts) - reach), min(whole, max(ends) + reach)
    if not size < end - start <= 2 * reach + FARTHEST * size:
        return None
    with torch.no_grad():
        memory = first.as_strided((end - start,), (1,), start).clone()
        for view in views:
            memory.as_strided(view.shape, view.stride(), view.storage_offset() - start).zero_()
    return memory


@dataclass(frozen=True, slots=True)
class Suspicion:
    """A change that the candidate seems to have made.

    Attributes:
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


Observation = Iterator[Suspicion | None]
"""What an observer yields: None once it has looked before the candidate runs, and after both sides have run what seems
to have changed."""


def _settings(record: CallRecord) -> Observation:
    """The settings of the process. They are set to eager's at once, or the program would go on with others."""
    before = ProcessState.capture()
    yield None
    eager = record.eager_settings
    findings = check_settings(
        before,
        before if eager is None else before.moved(*eager),
        record.settings or ProcessState.capture(),
        again=partial(record.checks.comparison.runner(record.call).run, AGAIN[0]),
        skip=record.checks.reporter.skip,
        others_ran=record.others_ran,
        ran=isinstance(record.reference, Execution),
    )
    yield from map(Suspicion, findings)


def _inputs(record: CallRecord) -> Observation:
    """Inputs that eager leaves alone; of the others the counts of writes, and whether gradients lead through these."""
    inputs, subjects, args = record.call.inputs, record.call.subjects, record.args
    before, writes = inputs.fingerprints(args), WriteCounts.of(args)
    record.call.fingerprints = before
    structures = {place: _structure(args[place]) for place in before}
    yield None
    now = fingerprints([args[place] for place in before])
    changed = [place for (place, value), new in zip(before.items(), now, strict=True) if new != value]
    for place in changed:
        message = "the compiled program changed an input that eager leaves alone"
        yield Suspicion(memory_written(subjects.mutated(place), message))
    if isinstance(record.reference, Execution):
        moved = {place for place, known in structures.items() if _structure(args[place]) != known}
        yield from map(Suspicion, _other_structure(record, record.reference, moved))
        if record.checks.info.graph is None:  # else the caller of AOT autograd's graph counts, and leads gradients
            yield from map(Suspicion, _uncounted_writes(record, record.reference, writes))
            yield from map(Suspicion, _unled_gradients(record, record.reference))


def _structure(tensor: torch.Tensor) -> tuple[Any, ...]:
    if tensor.is_nested or tensor.layout is not torch.strided:
        return (tensor.requires_grad,)
    return tensor.shape, tensor.stride(), tensor.requires_grad


def _other_structure(record: CallRecord, reference: Execution, moved: Iterable[int]) -> Iterator[Finding]:
    """Findings about inputs whose shape, strides or ``requires_grad`` the candidate has changed, and eager has not."""
    for place in moved:
        for found in compare_structure(reference=reference.arguments[place], candidate=record.args[place]):
            message = f"the compiled program changed the {found.aspect} of an input that eager leaves alone"
            written = memory_written(record.call.subjects.mutated(place), message)
            yield replace(written, expected=found.expected, actual=found.actual)


def _uncounted_writes(record: CallRecord, reference: Execution, before: WriteCounts) -> Iterator[Finding]:
    """Findings about inputs that both change, where eager's writes are counted and the candidate's are not.

    How often each counts is its own affair. Tensors in one memory may have a count together, so one of them is enough.
    """
    args, pristine = record.args, record.call.inputs.pristine
    told = {storage_key(args[place]) for place in before.advanced(args)}
    message = (
        "the compiled program wrote to this input without counting the write in its version, as eager does: a backward "
        "pass for which the old values were saved takes the new ones and does not raise; call "
        "torch.autograd.graph.increment_version for what is written to through raw memory"
    )
    for place in sorted(reference.counted & before.counts.keys() & pristine.keys()):
        after = (reference.arguments[place], args[place])
        if storage_key(args[place]) not in told and fingerprint(pristine[place]) not in map(fingerprint, after):
            yield Finding(
                Kind.MUTATION,
                record.call.subjects.mutated(place),
                message,
                "mutation.uncounted",
                expected="a version that the call has raised",
                actual="the version before the call",
            )


def _unled_gradients(record: CallRecord, reference: Execution) -> Iterator[Finding]:
    """Findings about inputs whose gradients lead through what eager wrote, but not through what the candidate wrote."""
    call = record.call
    led = reference.led - call.inputs.entangled
    for edge, place in input_edges(record.args, led).items():
        if record.edges.get(edge) == place:
            part = Part(call.subjects.mutated(place), reference.arguments[place], record.args[place])
            expected, actual = "gradients that lead through what was written to it", "gradients as before the call"
            yield gradients_lost(part.differs("requires_grad", "", expected, actual))


def _earlier_results(record: CallRecord) -> Observation:
    """Results of earlier calls that the program holds."""
    earlier = record.checks.earlier
    before = earlier.look(record.args)
    yield None
    outputs = record.reference.outputs if isinstance(record.reference, Execution) else ()
    yield from map(Suspicion, before.overwritten(record.call.number, earlier.region, record.returned, outputs))


def _surroundings(record: CallRecord) -> Observation:
    """Memory around views.

    A kernel that writes past the end of a slice changes the tensor that the slice is a view of. No input shows that.
    """
    before = _fingerprints_around(record.args)
    yield None
    changed = _changed(before, record.args)
    if not changed:
        return
    call, variants, subjects = record.call, record.checks.variants, record.call.subjects
    by_eager, again = (
        cache(partial(_changed_by, region, call, record.args, before))
        for region in (variants.reference, variants.candidate)
    )
    # that a thread ran meanwhile is not always visible at once: its time is told some milliseconds later
    others = threading.active_count() > 1 or record.others_ran
    message = (
        "the compiled program wrote to memory beside this input, which is a view: to elements of its base that are "
        "outside of it, and that eager leaves alone"
    )
    why = "it was changed meanwhile; another thread ran, and the compiled program alone does not change it"
    for place in sorted(changed):
        yield Suspicion(
            memory_written(subjects.mutated(place), message, "mutation.beyond"),
            by_eager=lambda place=place: place in by_eager(),  # type: ignore[misc]
            again=(lambda place=place: place in again()) if others else None,  # type: ignore[misc]
            doubt=Skip(f"what lies beside {subjects.inputs[place]}", why, matters=True),
        )


def _random_state(record: CallRecord) -> Observation:
    """The states of torch's generators. They are the whole process's: another thread that draws moves them too."""
    yield None  # both sides begin from the state that the record has
    left = record.call.final_rng_states
    if left is None or left.candidate.same_as(left.reference):
        return
    runner = record.checks.comparison.runner(record.call)
    alone = threading.active_count() == 1 and not left.others_ran
    yield Suspicion(
        rng_state_differs(),
        by_eager=lambda: not runner.random_states()[0].same_as(left.reference),  # torch.seed, or a thread that draws
        again=None if alone else lambda: runner.others_drew() is None,
        doubt=Skip("rng state", "it differed, not each time, and another thread ran meanwhile, which may draw"),
    )


IF_ONE_RAISES = (_settings,)
"""The observers that are also asked where a side raises."""

IF_BOTH_RETURN = (_inputs, _earlier_results, _surroundings, _random_state)
"""Those that are asked where both sides return, in this order."""
