"""Runs of a region for its check: repeated, perturbed, in float64, and of other builds.

Each run returns the same subjects as the check itself compares. No run touches the user's tensors, autograd graph or
random streams.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch

from checked_backend._torch.traces import profiled
from checked_backend.errors import CheckedBackendError
from checked_backend.graphs.schema import is_built_in
from checked_backend.modes.choice_tape import ChoiceTape, RecordChoices, ReplayChoices
from checked_backend.modes.float64 import Float64Mode
from checked_backend.modes.monte_carlo import MonteCarloMode, OneZero, PoisonMode
from checked_backend.modes.random_tape import RandomTape, RecordRandom, ReplayRandom
from checked_backend.process.memory import with_deep_stack
from checked_backend.regions.compile import CompiledOnce
from checked_backend.regions.execution import Call, Cotangents
from checked_backend.regions.float64_twin import TwinError, default_dtype
from checked_backend.regions.memory_pressure import MemoryPressure
from checked_backend.regions.operator_check.step import OperatorStep
from checked_backend.regions.torch_state import RngState
from checked_backend.regions.waiting import Waiting
from checked_backend.verdict.runner import REPEAT, Build, Control, Facts, PostponedError, Recipe, Values

SECONDS_TO_DRAW = 0.1
"""Seconds in which a thread that draws random numbers all the time will have drawn some."""

TIMES_RUN = 3
"""How often both sides run again to see whether a thread draws: one that draws now and then may leave a run alone."""

Region = Callable[..., Any]

_Result = TypeVar("_Result")

Modes = Sequence[AbstractContextManager[Any]]


@dataclass(frozen=True, slots=True)
class Variants:
    """A region and its variants.

    Attributes:
        compilers: Compile other builds of the region for given inputs, outside of the user's program.
        make_own_random: Compiles the region with the compiler's own random operators, where the candidate has eager's.
        default_dtype: Whether the region depends on torch's default dtype, so that runs in float64 must change it.
        low_precision: Whether the region computes in half precision somewhere.
        operators: Checks the operators of such a region, each by itself.
        compiling_twin: The block in which the float64 twin is compiled, its backward pass too, which is compiled as it
            runs.
        entangled: The reason why the region cannot be run without its exchanges with other ranks; "" if it can.
        compiling: Seconds that the candidate took to compile; its float64 twin takes about as long.
    """

    reference: Region
    candidate: Region
    compilers: Mapping[Build, Callable[[Sequence[Any]], Region]]
    make_own_random: Callable[[Sequence[Any]], Region] | None = None
    default_dtype: bool = True
    low_precision: bool = False
    operators: OperatorStep | None = None
    compiling_twin: Callable[[], AbstractContextManager[None]] = nullcontext
    entangled: str = ""
    compiling: float = 0.0
    waiting: Waiting = field(default_factory=lambda: Waiting("", tells=False))


def noise_of(recipe: Recipe) -> MonteCarloMode | PoisonMode | OneZero | None:
    """The mode that disturbs a run; None for a run that nothing disturbs."""
    if recipe.junk is not None:
        return PoisonMode(recipe.junk)
    if recipe.negative_zero is not None:
        return OneZero(negative=recipe.negative_zero)
    if recipe.seed is None:
        return None
    return MonteCarloMode(recipe.seed, recipe.magnitude, correlated=recipe.float64 or recipe.magnitude > 1)


@dataclass(frozen=True, slots=True)
class EagerTape:
    """What eager drew and chose in one evaluation.

    Attributes:
        draws: Its random numbers; None before they were recorded.
        choices: Its choices, at its own precision (False) and in float64 (True).
    """

    draws: RandomTape | None = None
    choices: Mapping[bool, ChoiceTape] = field(default_factory=dict)

    def of_run(self, recipe: Recipe) -> EagerTape:
        """This tape, with empty ones for what a run records."""
        if not recipe.records_choices:
            return self
        draws = self.draws if recipe.junk is None else RandomTape()
        return EagerTape(draws, {**self.choices, recipe.float64: ChoiceTape()})

    def modes(
        self,
        recipe: Recipe,
        noise: AbstractContextManager[Any] | None,
        *,
        default_dtype: bool = True,
        coarse: bool = False,
    ) -> Modes:
        """The modes of a run, the outermost first.

        Args:
            default_dtype: Whether a run in float64 changes torch's default dtype.
            coarse: Whether noise in float64 includes kernels that have float32 constants.
        """
        modes: list[AbstractContextManager[Any]] = []
        if self.draws is not None and (recipe.replays_draws or recipe.junk is not None):
            modes.append(ReplayRandom(self.draws) if recipe.junk is None else RecordRandom(self.draws))
        if recipe.records_choices:
            modes.append(RecordChoices(self.choices[recipe.float64]))
        if noise is not None:
            modes.append(noise)
        if recipe.keeps_choices and recipe.float64 in self.choices:
            # after the noise, so that it does not see the parts of an operator that the noise takes apart
            modes.append(ReplayChoices(self.choices[recipe.float64]))
        if recipe.float64 and recipe.build is Build.EAGER:
            modes.append(Float64Mode(default_dtype=default_dtype, coarse=coarse and recipe.seed is not None))
        return modes


def learn(facts: Facts, recipe: Recipe, tape: EagerTape, modes: Modes) -> None:
    """Take note of what a run has shown."""
    if recipe.records_choices and len(tape.choices[recipe.float64]):
        facts.chooses.add(recipe.float64)
    for mode in modes:
        if isinstance(mode, MonteCarloMode) and not recipe.float64:
            facts.left_out[Control.MONTE_CARLO] |= mode.unperturbed
        elif isinstance(mode, Float64Mode):
            facts.left_out[Control.FLOAT64] |= mode.lossy
        elif isinstance(mode, ReplayChoices) and mode.flips:
            facts.flips.add(recipe.float64)


@dataclass(slots=True)
class RegionRunner:
    """Runs one call of a region once more. No run here repeats its exchanges with other ranks.

    Attributes:
        variants: The variants of the region that can be run.
        memory: Decides what to do if memory runs out.
        cotangents: If given, the subjects are gradients instead of results.
    """

    variants: Variants
    call: Call
    memory: MemoryPressure
    cotangents: Cotangents | None = None
    facts: Facts = field(default_factory=Facts, init=False)
    _tape: EagerTape = field(default_factory=EagerTape, init=False)

    def run(self, recipe: Recipe) -> Values | None:
        """Run it once; with less, if memory runs out. It is a range in the profiler's trace."""
        much = recipe.float64 or recipe.build not in (Build.EAGER, Build.COMPILED)
        return self._sparing(recipe.control, lambda: self._run(recipe), float64=much)

    def _sparing(self, control: Control, make: Callable[[], _Result], *, float64: bool) -> _Result:
        with profiled(f"checked_backend::control run {control.value}"), self.variants.waiting.control_run(control):
            return self.memory.control(make, float64=float64)

    @with_deep_stack
    def _run(self, recipe: Recipe) -> Values | None:
        if freed := self.call.freed_inputs():
            raise CheckedBackendError(f"the program freed the memory of {', '.join(freed)} after its forward pass")
        if recipe.replays_draws:
            self._record()
        if recipe.build is Build.EAGER:
            return self._values(self.variants.reference, recipe)
        if recipe.build is Build.COMPILED:
            return self._values(self.variants.candidate, recipe)
        widens = recipe.float64 and self.variants.default_dtype
        with ExitStack() as stack:
            if recipe.build is Build.TWIN:
                stack.enter_context(self.variants.compiling_twin())
            region = self._built(recipe)
            if region is None:
                return None
            stack.enter_context(default_dtype(torch.float64) if widens else nullcontext())
            # A first run, because a lazily compiled backward must not be compiled under the replaying mode.
            values = self._values(region, replace(recipe, replays_draws=False))
            if self.facts.draws:
                del values  # the next run makes its own
                values = self._values(region, recipe)
            return values

    def _record(self) -> None:
        if self._tape.draws is None:
            self.run(REPEAT)

    def _values(self, region: Region, recipe: Recipe) -> Values:
        tape, call = self._tape.of_run(recipe), self.call
        modes = tape.modes(recipe, noise_of(recipe), default_dtype=self.variants.default_dtype, coarse=True)
        execution = call.run(
            region,
            modes=modes,
            wide=recipe.float64,
            cotangents=None if self.cotangents is None else self.cotangents.copied(wide=recipe.float64),
        )
        self._tape = tape
        if recipe == REPEAT and self.cotangents is not None:
            self.facts.written = tuple(call.written_inputs())
        if tape.draws is not None:
            self.facts.draws, self.facts.draws_by_values = not tape.draws.empty, tape.draws.by_values
        learn(self.facts, recipe, tape, modes)
        if self.cotangents is None:
            return {**execution.values(call.subjects, sorted(call.inputs.mutated)), **execution.sent}
        return {**execution.gradient_values(call.subjects), **execution.sent}

    def _built(self, recipe: Recipe) -> Region | None:
        """Another build of the region; None if there is no such build.

        Raises:
            PostponedError: Compiling it has not been earned yet.
            TwinError: A custom operator returns less than float64 in float64. Where its fake kernel says otherwise, a
                program compiled in float64 would write past the end of that tensor.
        """
        lossy = [] if recipe.build is not Build.TWIN else self.facts.left_out[Control.FLOAT64]
        if short := sorted(name for name in lossy if not is_built_in(name)):
            raise TwinError(f"{', '.join(short)} returns less than float64 in float64")
        make, seconds = self.variants.compilers.get(recipe.build), self.variants.compiling
        if make is None:
            return None
        bare, _ = self.call.fresh(wide=recipe.float64)
        autocast = torch.autocast("cpu", enabled=False) if recipe.float64 else nullcontext()
        with self.call.undisturbed(), self.call.ambient.entered(), autocast:
            free = recipe.urgent or not isinstance(make, CompiledOnce) or make.is_ready(bare)
            if not (free or self.call.check.may_take(seconds)):
                raise PostponedError(f"compiling its float64 twin takes about {seconds:.2g} s")
            return make(bare)

    def others_drew(self) -> str | None:
        """Evidence that another thread drew random numbers during the call, in words; None if there is none."""
        left = self.call.final_rng_states
        if left is None:
            return None
        before = left.reference.now()
        time.sleep(SECONDS_TO_DRAW)
        if not before.now().same_as(before):
            return "torch's random state moves while neither eager nor the compiled program runs"
        for _ in range(TIMES_RUN if left.others_ran else 0):
            reference, candidate = self.random_states()
            if not (left.reference.same_as(reference) and left.candidate.same_as(candidate)):
                return "it ran during this call, which left a random state that neither side leaves alone"
        return None

    def random_states(self) -> tuple[RngState, RngState]:
        """The random states that the reference and the candidate leave when they run from the one before the call."""
        run, variants = self.call.run, self.variants
        return self._sparing(
            Control.OTHER_THREADS,
            lambda: (run(variants.reference).final_rng, run(variants.candidate).final_rng),
            float64=False,
        )

    def returns_with_own_random(self) -> bool:
        """Whether the candidate, compiled with its own random operators, returns instead of raising."""
        if self.variants.make_own_random is None:
            return False
        bare, _ = self.call.fresh()
        try:
            with self.call.undisturbed(), self.call.ambient.entered():
                region = self.variants.make_own_random(bare)
            self.call.run(region)
        except Exception:  # as the candidate itself did
            return False
        return True
