"""Control runs of a region: repeated, perturbed, in float64, and the float64 twin.

Each returns the same subjects as the check itself compares. None touches the user's tensors, autograd graph or random
streams.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from checked_backend.errors import CheckedBackendError
from checked_backend.interpret.perturb import MonteCarloMode, PoisonMode
from checked_backend.interpret.promote import HighPrecisionMode, promote
from checked_backend.interpret.random import RandomTape, RecordRandom, ReplayRandom
from checked_backend.regions.ambient import Ambient, RngState
from checked_backend.regions.execution import Cotangents, Subjects, execute
from checked_backend.regions.inputs import Inputs
from checked_backend.regions.twin import default_dtype

__all__ = ["Controls", "MadeElsewhereError", "RegionControls", "Values", "Variants"]

Values = dict[str, torch.Tensor]
Region = Callable[..., Any]


class MadeElsewhereError(CheckedBackendError):
    """A control run that another check of the same program makes."""


class Controls(Protocol):
    """What an adjudication may ask for. Each method may raise; the adjudication then does without it."""

    def repeat(self) -> Values:
        """The reference again, with other junk in uninitialised memory."""

    def repeat_candidate(self) -> Values:
        """The candidate again, on the reference's recorded random numbers."""

    def candidate_alone(self) -> Values:
        """The candidate again, drawing its own random numbers from the random state before the call."""

    def monte_carlo(self, seed: int, magnitude: float) -> Values:
        """The reference with every rounding made random; beyond one unit roundoff, with correlated sums."""

    def high_precision(self, seed: int | None) -> Values:
        """The reference in float64; with a seed, perturbed at float64's roundoff."""

    def twin(self) -> Values:
        """The candidate compiled in float64."""

    def unfused(self) -> Values | None:
        """The candidate compiled so that it rounds wherever eager does; None if its compiler has no such mode."""


@dataclass(frozen=True, slots=True)
class Variants:
    """A region, and what can be made of it.

    Attributes:
        reference: The region in eager.
        candidate: The compiled region.
        make_twin: Compiles the float64 twin for float64 inputs.
        make_unfused: Compiles the region so that it rounds wherever eager does; None if the compiler cannot.
        default_dtype: Whether the region depends on torch's default dtype, so that runs in float64 must change it.
        low_precision: Whether the region computes in half precision somewhere.
    """

    reference: Region
    candidate: Region
    make_twin: Callable[[Sequence[Any]], Region]
    make_unfused: Callable[[Sequence[Any]], Region] | None = None
    default_dtype: bool = True
    low_precision: bool = False


@dataclass(slots=True)
class RegionControls:
    """Control runs of one call of a region.

    Attributes:
        variants: What can be run.
        inputs: The call's inputs.
        ambient: Modes at the call.
        rng: Random state before the call.
        subjects: Names.
        cotangents: With them, gradients are subjects instead of results.
    """

    variants: Variants
    inputs: Inputs
    ambient: Ambient
    rng: RngState
    subjects: Subjects
    cotangents: Cotangents | None = None
    _tape: RandomTape | None = field(default=None, init=False)

    def repeat(self) -> Values:
        """The reference again from the same random state, with junk in uninitialised memory; records the tape."""
        tape = RandomTape()
        values = self._run(self.variants.reference, modes=(lambda: RecordRandom(tape), lambda: PoisonMode(1)))
        self._tape = tape
        return values

    def repeat_candidate(self) -> Values:
        """The candidate again, on the reference's recorded random numbers where it draws them through torch."""
        return self._run(self.variants.candidate, modes=(lambda: ReplayRandom(self._recorded()),))

    def candidate_alone(self) -> Values:
        """The candidate again, from the random state before the call."""
        return self._run(self.variants.candidate, modes=())

    def random_states(self) -> tuple[RngState, RngState]:
        """The random states that the reference and the candidate leave when they run from the one before the call."""
        left = []
        for region in (self.variants.reference, self.variants.candidate):
            arguments, leaves = self.inputs.fresh()
            with self._undisturbed(), self.ambient.entered():
                self.rng.restore()
                execute(region, arguments, leaves)
                left.append(RngState.capture(tuple(self.rng.cuda)))
        return left[0], left[1]

    def monte_carlo(self, seed: int, magnitude: float) -> Values:
        """The reference with every operator's result perturbed."""
        tape = self._recorded()
        return self._run(
            self.variants.reference,
            modes=(lambda: ReplayRandom(tape), lambda: MonteCarloMode(seed, magnitude, correlated=magnitude > 1)),
        )

    def high_precision(self, seed: int | None) -> Values:
        """The reference in float64."""
        tape = self._recorded()
        modes: list[Callable[[], Any]] = [lambda: ReplayRandom(tape)]
        if seed is not None:
            modes.append(lambda: MonteCarloMode(seed, correlated=True))
        modes.append(lambda: HighPrecisionMode(default_dtype=self.variants.default_dtype))
        return self._run(self.variants.reference, modes=modes, wide=True)

    def twin(self) -> Values:
        """The candidate compiled in float64, on the reference's recorded random numbers."""
        bare, _ = self.inputs.fresh(_wide)
        with self._undisturbed(), self.ambient.entered(), torch.autocast("cpu", enabled=False):
            region = self.variants.make_twin(bare)
        with default_dtype(torch.float64) if self.variants.default_dtype else nullcontext():
            return self._replayed(region, wide=True)

    def unfused(self) -> Values | None:
        """The candidate compiled so that it rounds wherever eager does, on the reference's recorded random numbers."""
        if self.variants.make_unfused is None:
            return None
        bare, _ = self.inputs.fresh()
        with self._undisturbed(), self.ambient.entered():
            region = self.variants.make_unfused(bare)
        return self._replayed(region)

    def _replayed(self, region: Region, *, wide: bool = False) -> Values:
        tape = self._recorded()
        # A first run, because a lazily compiled backward must not be compiled under the replaying mode.
        values = self._run(region, modes=(), wide=wide)
        return values if tape.empty else self._run(region, modes=(lambda: ReplayRandom(tape),), wide=wide)

    def _recorded(self) -> RandomTape:
        if self._tape is None:
            self.repeat()
        if self._tape is None:
            raise RuntimeError("the random tape was not recorded")
        return self._tape

    def _run(self, region: Region, *, modes: Sequence[Callable[[], Any]], wide: bool = False) -> Values:
        arguments, leaves = self.inputs.fresh(_wide if wide else None)
        cotangents = self.cotangents
        if cotangents is not None and wide:
            cotangents = _promoted(cotangents)
        with self._undisturbed(), ExitStack() as stack:
            self.rng.restore()
            for make in modes:
                stack.enter_context(make())
            with self.ambient.entered():
                execution = execute(region, arguments, leaves if cotangents is not None else {})
            if cotangents is None:
                return execution.values(self.subjects, sorted(self.inputs.mutated))
            graph = execution.graph(self.inputs.mutated)
            execution.outputs = ()  # frees what the backward pass does not need
            execution.gradients = graph.backward(cotangents, retain_graph=False)
            return execution.gradient_values(self.subjects)

    @contextmanager
    def _undisturbed(self) -> Iterator[None]:
        before = RngState.capture(tuple(self.rng.cuda))
        try:
            yield
        finally:
            before.restore()


def _wide(values: Sequence[Any]) -> list[Any]:
    """Make the tensors among a region's inputs float64, together, so that those which share memory still do."""
    places = [place for place, value in enumerate(values) if isinstance(value, torch.Tensor)]
    wide = list(values)
    for place, tensor in zip(places, promote([values[place] for place in places]), strict=True):
        wide[place] = tensor
    return wide


def _promoted(cotangents: Cotangents) -> Cotangents:
    keys = [*cotangents.outputs, *cotangents.mutated]
    wide = promote([*cotangents.outputs.values(), *cotangents.mutated.values()])
    count = len(cotangents.outputs)
    return Cotangents(
        dict(zip(keys[:count], wide[:count], strict=True)), dict(zip(keys[count:], wide[count:], strict=True))
    )
