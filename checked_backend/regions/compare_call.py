"""Compare one checked call of a region with eager: its results, and its backward passes."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from checked_backend._torch.traces import profiled
from checked_backend.errors import is_out_of_memory
from checked_backend.findings import Finding, Kind, Skip
from checked_backend.ranks.exchanges import Agreement
from checked_backend.regions.backward import BackwardPass, Gradients, was_written_to
from checked_backend.regions.call_findings import (
    compare_exceptions,
    described_exception,
    exception_missing,
    memory_written,
)
from checked_backend.regions.compare_parts import Part, compare_aliasing, compare_parts, value_pairs
from checked_backend.regions.draw_inputs import DrawInputs, compare_draw_inputs
from checked_backend.regions.eager import InputsChangedError, eager_gradients
from checked_backend.regions.execution import Call, Cotangents, Execution, Subjects, flat_tensors, results_of
from checked_backend.regions.graph_info import GraphInfo
from checked_backend.regions.memory_pressure import MemoryPressure
from checked_backend.regions.reporter import RegionReporter
from checked_backend.regions.runner import RegionRunner, Variants
from checked_backend.regions.schedule import is_recheck
from checked_backend.verdict.decide import decide, tolerate_flipped_shapes
from checked_backend.verdict.decisions import Decisions, TensorPair
from checked_backend.verdict.envelope import NoiseBaseline
from checked_backend.verdict.runner import PostponedError

COMPARABLE = frozenset({"structure.stride", "structure.requires_grad", "structure.device"})
"""Structure findings that leave the values comparable."""

FREE_IN_GRADIENTS = frozenset({"structure.stride", "structure.requires_grad"})
"""Aspects of a gradient that a compiler may choose: autograd itself lays gradients out as it accumulates them."""


@dataclass(eq=False)
class CallComparison:
    """Compares a region's candidate with its reference, and remembers the noise it has learned.

    Attributes:
        thorough: Whether to compile the float64 twin for every difference.
        draws: The region with the parameters of its draws as results; None if its draws have no computed parameters.
    """

    info: GraphInfo
    variants: Variants
    reporter: RegionReporter
    memory: MemoryPressure
    thorough: bool
    draws: DrawInputs | None
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    _scales: dict[str, NoiseBaseline] = field(default_factory=dict, init=False)
    _comparisons: Counter[bool] = field(default_factory=Counter, init=False)
    _short: dict[bool, bool] = field(default_factory=lambda: {False: False, True: False}, init=False)

    def forward(self, call: Call, reference: Execution, outputs: Sequence[Any], args: Sequence[Any]) -> list[Finding]:
        """Compare structure, aliasing and values of outputs and mutated inputs."""
        exchanged = self._exchanged(call)
        if not exchanged.complete:
            return exchanged.findings
        mutated = sorted(call.inputs.mutated)
        actual = results_of(outputs, {position: args[position] for position in mutated})
        parts = [
            Part(call.subjects.result(result), expected, actual[result], self.info.source(result))
            for result, expected in reference.results(mutated).items()
        ]
        free = frozenset(call.subjects.output(place) for place in self.info.free_outputs)
        structure = [
            found for found in compare_parts(parts, args) if found.subject not in free or not _is_layout(found)
        ]
        if self.info.graph is not None:  # AOT autograd says which of its graphs' results require grad
            structure = [found for found in structure if found.detail != "structure.requires_grad"]
        incomparable = frozenset(finding.subject for finding in structure if finding.detail not in COMPARABLE)
        left = call.exchanges.under_way({part.subject: part.candidate for part in parts})
        incomparable |= left.keys()
        structure, skips = tolerate_flipped_shapes(structure, partial(self.runner, call))
        for skip in (*skips, *left.values()):
            self.reporter.skip(skip)
        shared = self._aliasing(call, reference, outputs, args, parts)
        aliasing = [found for found in shared if found.subject not in free or not _is_layout(found)]
        found = [*exchanged.findings, *structure, *aliasing]
        decisions = self._values(call, parts, incomparable, None, exchanged)
        if decisions is None:
            return found
        self.reporter.count({"outputs": len(outputs), "mutated inputs": len(call.inputs.mutated)})
        if self.variants.operators is not None and not any(not finding.is_layout for finding in found):
            checked = self.variants.operators.forward(call, decisions, self._scales)
            self.reporter.count({"operators": checked})
        names = [call.subjects.output(index) for index in range(len(outputs))]
        return [*found, *self._absorb(decisions), *self._drawn_from(call, decisions, names)]

    def _drawn_from(self, call: Call, decisions: Decisions, outputs: Sequence[str]) -> list[Finding]:
        """Compare the parameters of draws, if results are rechecked or could not be compared."""
        unknown = any(skip.matters for skip in decisions.skips)
        if self.draws is None or not (decisions.recheck or decisions.findings or unknown):
            return []
        try:
            found = compare_draw_inputs(self.draws, self.runner(call), outputs, thorough=self.thorough)
        except Exception as error:
            words = f"could not be compared: {described_exception(error)}"
            self.reporter.skip(Skip("inputs of random operators", words, matters=unknown))
            return []
        self.reporter.count({"inputs of random operators": found.compared})
        return self._absorb(found)

    def backward(self, call: Call, passed: BackwardPass) -> tuple[list[Finding], Gradients] | None:
        """Compare the gradients of one backward pass.

        Returns:
            The findings and the reference's gradients by position; None if the reference's backward pass failed, which
            is then in the coverage.
        """
        if passed.differentiable:
            self.reporter.skip(Skip("double backward", "gradients of gradients are not checked"))
        before = passed.cotangents.copied() if passed.overwritten else passed.cotangents
        reference = self.eager_gradients(call, passed)
        if isinstance(reference, Warning):
            call.ignores_warnings = True
            reference = self.eager_gradients(call, passed)
        if isinstance(reference, Exception):  # the checker's own failure: never a pass
            if is_out_of_memory(reference):
                self.memory.not_compared("eager's backward pass", reference, backward=True)
                return None
            reason = f"the reference's backward pass raised {described_exception(reference)}"
            self.reporter.skip(Skip("gradients", reason, matters=True))
            return None
        exchanged = self._exchanged(call)
        if not exchanged.complete:
            return exchanged.findings, {}
        wanted = {position: grad for position, grad in passed.gradients.items() if position in reference}
        parts = [
            Part(
                call.subjects.gradient(position),
                *settle_none(reference[position], grad),
                self.info.source(("mutated", position)),
            )
            for position, grad in wanted.items()
        ]
        structure = [finding for finding in compare_parts(parts) if finding.detail not in FREE_IN_GRADIENTS]
        incomparable = frozenset(finding.subject for finding in structure)
        structure += _overwritten(call.subjects, passed, before)
        found = [*exchanged.findings, *structure]
        gradients = {position: reference[position] for position in wanted}
        decisions = self._values(call, parts, incomparable, passed.cotangents, exchanged)
        if decisions is None:
            return found, gradients
        if self.variants.operators is not None:
            self.variants.operators.backward(decisions, self._scales)
        self.reporter.end_backward({"gradients": len(parts)})
        return [*found, *self._absorb(decisions)], gradients

    def will_recheck(self, call: Call) -> bool:
        """Whether the gradients that are compared next are rechecked."""
        return is_recheck(call.check.number or self._comparisons[True] + 1)

    def eager_gradients(self, call: Call, passed: BackwardPass) -> Gradients | Exception:
        """The gradients that eager sends; its exception if it raises."""
        try:
            with profiled("checked_backend::reference backward"):
                return eager_gradients(self.variants.reference, call, passed, self.memory)
        except Exception as error:
            return error

    def exceptions(self, call: Call, reference: Exception, candidate: Exception) -> tuple[Finding | None, bool]:
        """Compare the exceptions of a call in which both raise.

        Returns:
            The finding, if there is one; and whether the user's program, unchecked, would not raise at all.
        """
        if self.runner(call).returns_with_own_random():
            return exception_missing(reference, own_random=True), True
        finding, remark = compare_exceptions(reference, candidate)
        if described_exception(reference) != described_exception(candidate) and remark:
            self.reporter.note(remark)
        return finding, False

    def backward_exceptions(self, reference: Exception, candidate: Exception) -> Finding | None:
        """Compare exceptions if both backward passes raise, for example because an input was written to in between."""
        if isinstance(reference, InputsChangedError):
            self.reporter.skip(Skip("gradients", f"the compiled backward pass raised; {reference}", matters=True))
            return None
        finding, remark = compare_exceptions(reference, candidate, during="backward")
        if remark:
            self.reporter.note(remark)
        return finding

    def _aliasing(
        self, call: Call, reference: Execution, outputs: Sequence[Any], args: Sequence[Any], parts: Sequence[Part]
    ) -> Iterator[Finding]:
        names = [f"input {name}" for name in call.subjects.inputs]
        subjects = [part.subject for part in parts[: len(outputs)]]
        return compare_aliasing(
            dict(zip(subjects, reference.outputs, strict=True)),
            dict(zip(names, reference.arguments, strict=True)),
            dict(zip(subjects, outputs, strict=True)),
            dict(zip(names, args, strict=True)),
            {part.subject: part.source for part in parts},
        )

    def _values(
        self,
        call: Call,
        parts: Sequence[Part],
        incomparable: frozenset[str],
        cotangents: Cotangents | None,
        exchanged: Agreement,
    ) -> Decisions | None:
        """Compare values. None if they were not compared to the end, because a control run is not earned yet."""
        backward, pristine = cotangents is not None, call.inputs.pristine
        before = {} if backward else {call.subjects.mutated(position): value for position, value in pristine.items()}
        pairs = list(exchanged.pairs)
        for part, name, reference, candidate in value_pairs(parts, incomparable):
            kind, detail = None, ""
            if part.subject in before:
                kind, detail = Kind.MUTATION, "mutation.wrong"
                # for a distributed tensor, its own shard
                plain = flat_tensors(part.subject, before[part.subject]).get(name)
                if plain is not None and plain.shape == candidate.shape and torch.equal(plain, candidate.detach()):
                    detail = "mutation.dropped"
            pairs.append(TensorPair(part.subject, name, reference, candidate, kind, detail, part.source))

        with self._lock:
            self._comparisons[backward] += 1
            number = self._comparisons[backward]
            recheck = is_recheck(call.check.number or number)
            known = {} if recheck and self._short[backward] else dict(self._scales)
        try:
            decisions = decide(
                pairs,
                partial(self.runner, call, cotangents),
                known,
                thorough=self.thorough,
                low_precision=self.variants.low_precision,
                recheck=recheck,
                operators_checked=self.variants.operators is not None and self.variants.operators.is_checked,
                signs=recheck and not backward,  # gradients are summed up, so the sign of their zeros does not matter
            )
        except PostponedError as error:
            reason = (
                f"postponed: {error}, which the run has not earned yet (option budget); no value was outside of its "
                "noise"
            )
            skip = Skip("gradients" if backward else "results", reason, matters=True)
            self.reporter.skip_until_compared(skip, backward=backward)
            return None
        if recheck:
            self._short[backward] = decisions.short_of_memory  # what they would have shown is asked again
        call.check.made = True
        call.ratios = decisions.ratios
        return decisions

    def _exchanged(self, call: Call) -> Agreement:
        """Compare what the reference (it ran just now) would have sent to other ranks with what the candidate sent."""
        if not call.exchanges:
            return Agreement()
        exchanged = call.exchanges.agreement()
        if self.variants.low_precision and self.variants.entangled:
            self.reporter.note(
                "its operators were not checked by themselves, as those of other regions in half precision are: it "
                f"exchanges tensors with other ranks, and {self.variants.entangled}"
            )
        for skip in exchanged.skips:
            self.reporter.skip(skip)
        self.reporter.count({"tensors sent to other ranks": len(exchanged.pairs)})
        return exchanged

    def exchanged_otherwise(self, call: Call, error: Exception) -> list[Finding]:
        """Findings about a call whose reference did not receive what it needed from other ranks."""
        exchanged = self._exchanged(call)
        if not exchanged.findings:
            why = f"eager could not be run to compare them: {described_exception(error)}"
            self.reporter.skip(Skip("results", why, matters=True))
        return exchanged.findings

    def runner(self, call: Call, cotangents: Cotangents | None = None) -> RegionRunner:
        """What runs a call again; with gradients that arrived, its backward pass too."""
        return RegionRunner(self.variants, call, self.memory, cotangents)

    def _absorb(self, decisions: Decisions) -> list[Finding]:
        with self._lock:
            for name, scale in decisions.scales.items():
                # what is nothing but rounding may have another size each time, and hides errors of all sizes between
                anew = decisions.recheck and scale.sizes is not None
                self._scales[name] = scale if anew else scale.widened(self._scales.get(name))
        self.reporter.count({"tensors": decisions.compared})
        self.reporter.limits(decisions.limits, decisions.own_precision_limits)
        for skip in decisions.skips:
            self.reporter.skip(skip)
        for note in decisions.notes:
            self.reporter.note(note)
        return decisions.findings


def _overwritten(subjects: Subjects, passed: BackwardPass, before: Cotangents) -> Iterator[Finding]:
    """Findings about incoming gradients that the candidate wrote to, and eager did not."""
    for result in passed.overwritten:
        if not was_written_to(before.by_result.get(result), passed.cotangents.by_result.get(result)):
            message = (
                "the compiled backward pass wrote to the gradient that arrived there, which eager leaves alone: "
                "whoever else uses that tensor finds other numbers in it"
            )
            yield memory_written(f"gradient of {subjects.result(result)}", message)


def _is_layout(finding: Finding) -> bool:
    """Whether a finding is about strides, or about memory that eager shares and the candidate does not."""
    separate = finding.kind is Kind.ALIAS and (finding.actual or "").startswith("separate memory")
    return separate or finding.detail in FREE_IN_GRADIENTS or finding.detail == "alias.identity"


def settle_none(
    reference: torch.Tensor | None, candidate: torch.Tensor | None
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Treat zeros like no gradient: AOT autograd sends zeros where eager sends nothing, and both mean no influence."""
    if reference is None and candidate is not None and _is_zero(candidate):
        return candidate, candidate
    if candidate is None and reference is not None and _is_zero(reference):
        return reference, reference
    return reference, candidate


def _is_zero(tensor: torch.Tensor) -> bool:
    """Whether all elements are zero. For a distributed tensor only its shard is read, so no other rank is asked."""
    return not any(bool(part.count_nonzero()) for part in flat_tensors("", tensor).values())
