"""Control runs of a region: repeated, perturbed, in float64, and the float64 twin.

Each run returns the same subjects as the check itself compares. No run touches the user's tensors, autograd graph or
random streams.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

from checked_backend._torch.traces import profiled
from checked_backend.modes.choice_tape import ChoiceTape, RecordChoices, ReplayChoices
from checked_backend.modes.float64 import Float64Mode, to_float64
from checked_backend.modes.monte_carlo import MonteCarloMode, PoisonMode
from checked_backend.modes.random_tape import RandomTape, RecordRandom, ReplayRandom
from checked_backend.modes.zeros import OneZero
from checked_backend.ranks.exchanges import replaying
from checked_backend.regions.call import Call
from checked_backend.regions.execution import Cotangents, execute
from checked_backend.regions.fixed_choices import FixedChoices
from checked_backend.regions.float64_twin import default_dtype
from checked_backend.regions.memory_pressure import MemoryPressure
from checked_backend.regions.operator_check.step import OperatorStep
from checked_backend.regions.recompile import CompiledOnce
from checked_backend.regions.torch_state import RngState
from checked_backend.regions.waiting import Waiting
from checked_backend.verdict.control_runs import Control, ControlRuns, PostponedError, Values, nothing_left_out

__all__ = ["RegionControlRuns", "Variants"]

Region = Callable[..., Any]

_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class Variants:
    """A region and its variants.

    Attributes:
        reference: The region in eager.
        candidate: The compiled region.
        make_twin: Compiles the float64 twin for float64 inputs.
        given: The region with its choices given as inputs.
        make_unfused: Compiles the region so that it rounds wherever eager does; None if the compiler cannot.
        make_again: Compiles the region once more, as it is, outside of the user's program.
        make_own_random: Compiles the region with the compiler's own random operators, where the candidate has eager's.
        default_dtype: Whether the region depends on torch's default dtype, so that runs in float64 must change it.
        low_precision: Whether the region computes in half precision somewhere.
        operators: Checks the operators of such a region, each by itself.
        entangled: The reason why the region cannot be run without its exchanges with other ranks; "" if it can.
        compiling: Seconds that the candidate took to compile; its float64 twin takes about as long.
        waiting: Tells a person what a long check is doing.
    """

    reference: Region
    candidate: Region
    make_twin: Callable[[Sequence[Any]], Region]
    given: FixedChoices | None = None
    make_unfused: Callable[[Sequence[Any]], Region] | None = None
    make_again: Callable[[Sequence[Any]], Region] | None = None
    make_own_random: Callable[[Sequence[Any]], Region] | None = None
    default_dtype: bool = True
    low_precision: bool = False
    operators: OperatorStep | None = None
    entangled: str = ""
    compiling: float = 0.0
    waiting: Waiting = field(default_factory=lambda: Waiting("", tells=False))


def _sparing(
    *, float64: bool
) -> Callable[
    [Callable[Concatenate[RegionControlRuns, _Given], _Result]],
    Callable[Concatenate[RegionControlRuns, _Given], _Result],
]:
    """Make a control run with less if memory runs out; it is a range in the profiler's trace."""

    def decorate(
        make: Callable[Concatenate[RegionControlRuns, _Given], _Result],
    ) -> Callable[Concatenate[RegionControlRuns, _Given], _Result]:
        name = f"checked_backend::control run {make.__name__.replace('_', ' ')}"

        @wraps(make)
        def run(runs: RegionControlRuns, /, *args: _Given.args, **kwargs: _Given.kwargs) -> _Result:
            with profiled(name), runs.variants.waiting.control_run(make.__name__):
                if runs.memory is None:
                    return make(runs, *args, **kwargs)
                return runs.memory.control(lambda: make(runs, *args, **kwargs), float64=float64)

        return run

    return decorate


@dataclass(slots=True)
class RegionControlRuns:
    """Control runs of one call of a region.

    Attributes:
        variants: The variants of the region that can be run.
        call: The call. No run here repeats its exchanges with other ranks.
        cotangents: If given, the subjects are gradients instead of results.
        memory: Decides what to do if memory runs out; without it, nothing is done.
    """

    variants: Variants
    call: Call
    cotangents: Cotangents | None = None
    memory: MemoryPressure | None = None
    _tape: RandomTape | None = field(default=None, init=False)
    _choices: ChoiceTape | None = field(default=None, init=False)
    _choices64: ChoiceTape | None = field(default=None, init=False)
    _flips: set[bool] = field(default_factory=set, init=False)
    _left_out: Mapping[Control, set[str]] = field(default_factory=nothing_left_out, init=False)

    @_sparing(float64=False)
    def repeat(self, junk: int = 1) -> Values:
        """The reference again from the same random state, with junk in uninitialised memory; records the tapes."""
        tape, choices = RandomTape(), ChoiceTape()
        modes = (lambda: RecordRandom(tape), lambda: RecordChoices(choices), lambda: PoisonMode(junk))
        values = self._run(self.variants.reference, modes=modes)
        self._tape, self._choices = tape, choices
        return values

    @_sparing(float64=False)
    def bare(self) -> Values:
        """The reference again from the same random state, under no mode."""
        return self._run(self.variants.reference, modes=())

    @_sparing(float64=False)
    def replay_candidate(self) -> Values:
        """The candidate again, on the reference's recorded random numbers as far as it draws through torch."""
        return self._run(self.variants.candidate, modes=(lambda: ReplayRandom(self._recorded()),))

    @_sparing(float64=False)
    def rerun_candidate(self) -> Values:
        """The candidate again, from the random state before the call."""
        return self._run(self.variants.candidate, modes=())

    @_sparing(float64=False)
    def reseeded(self, seed: int) -> Values:
        """The reference on other random numbers."""
        return self._run(self.variants.reference, modes=(), rng=self.call.rng.reseeded(seed))

    def run_on(self, arguments: Sequence[Any], region: Region | None = None) -> RngState:
        """The reference, or another region, on these very arguments, from the random state before the call.

        Returns:
            The random state that it leaves.
        """
        with self.undisturbed(), self.call.ambient.entered():
            self.call.rng.restore()
            with replaying(self.call.exchanges).forward():
                execute(region or self.variants.reference, arguments, {})
            return RngState.capture(tuple(self.call.rng.cuda))

    def others_drew(self) -> str | None:
        """Evidence that another thread drew random numbers during the call; None if there is none."""
        states = self.call.final_rng_states
        return None if states is None else states.others_drew(self.random_states)

    def returns_with_own_random(self) -> bool:
        """Whether the candidate, compiled with its own random operators, returns instead of raising."""
        if self.variants.make_own_random is None:
            return False
        bare, _ = self.call.inputs.fresh()
        try:
            with self.undisturbed(), self.call.ambient.entered():
                region = self.variants.make_own_random(bare)
            self.run_on(self.call.inputs.fresh()[0], region)
        except Exception:  # as the candidate itself did
            return False
        return True

    @_sparing(float64=False)
    def random_states(self) -> tuple[RngState, RngState]:
        """The random states that the reference and the candidate leave when they run from the one before the call."""
        reference = self.run_on(self.call.inputs.fresh()[0])
        return reference, self.run_on(self.call.inputs.fresh()[0], self.variants.candidate)

    @_sparing(float64=False)
    def monte_carlo(self, seed: int, magnitude: float, *, replay_choices: bool = False) -> Values:
        """The reference with every operator's result perturbed."""
        tape = self._recorded()
        hold = ReplayChoices(self._choices) if replay_choices and self._choices is not None else None
        noise = MonteCarloMode(seed, magnitude, correlated=magnitude > 1)
        modes: list[Callable[[], Any]] = [lambda: ReplayRandom(tape), lambda: noise]
        if hold is not None:  # entered later, so that it does not see the parts of operators
            modes.append(lambda: hold)
        values = self._run(self.variants.reference, modes=modes)
        self._left_out[Control.MONTE_CARLO] |= noise.unperturbed
        self._take_note(hold, in_float64=False)
        return values

    @_sparing(float64=False)
    def one_zero(self, *, negative: bool) -> Values:
        """The reference with the same zero wherever an operator may return either."""
        tape = self._recorded()
        return self._run(
            self.variants.reference, modes=(lambda: ReplayRandom(tape), lambda: OneZero(negative=negative))
        )

    @_sparing(float64=True)
    def high_precision(self, seed: int | None, *, magnitude: float = 1.0, replay_choices: bool = False) -> Values:
        """The reference in float64."""
        tape, choices = self._recorded(), ChoiceTape()
        hold = ReplayChoices(self._choices64) if replay_choices and self._choices64 is not None else None
        modes: list[Callable[[], Any]] = [lambda: ReplayRandom(tape)]
        if seed is None:
            modes.append(lambda: RecordChoices(choices))
        if seed is not None:
            modes.append(lambda: MonteCarloMode(seed, magnitude, correlated=True))
        if hold is not None:
            modes.append(lambda: hold)
        wide = Float64Mode(default_dtype=self.variants.default_dtype, coarse=seed is not None)
        modes.append(lambda: wide)
        values = self._run(self.variants.reference, modes=modes, wide=True)
        self._left_out[Control.FLOAT64] |= wide.lossy
        if seed is None:
            self._choices64 = choices
        self._take_note(hold, in_float64=True)
        return values

    def draws(self) -> bool:
        """Whether the reference draws random numbers."""
        return self._tape is not None and not self._tape.empty

    def draws_by_values(self) -> tuple[str, ...]:
        """Operators of the reference whose draws depend on computed values."""
        return () if self._tape is None else self._tape.by_values

    def flips(self, *, in_float64: bool = False) -> bool:
        """Whether any run kept a recorded choice where the noise would have chosen otherwise."""
        return in_float64 in self._flips

    def _take_note(self, hold: ReplayChoices | None, *, in_float64: bool) -> None:
        if hold is not None and hold.flips:
            self._flips.add(in_float64)

    def left_out(self) -> Mapping[Control, Collection[str]]:
        """Operators whose results the runs so far could not perturb, or not compute in float64."""
        return self._left_out

    @_sparing(float64=True)
    def twin(self, *, urgent: bool = True) -> Values:
        """The candidate compiled in float64, on the reference's recorded random numbers."""
        bare, _ = self.call.inputs.fresh(_wide)
        with self.undisturbed(), self.call.ambient.entered(), torch.autocast("cpu", enabled=False):
            if not urgent:
                self._earn_twin(bare)
            region = self.variants.make_twin(bare)
        with default_dtype(torch.float64) if self.variants.default_dtype else nullcontext():
            return self._replayed(region, wide=True)

    def _earn_twin(self, inputs: Sequence[Any]) -> None:
        make, seconds = self.variants.make_twin, self.variants.compiling
        free = not isinstance(make, CompiledOnce) or make.is_ready(inputs)
        if not (free or self.call.meter is None or self.call.meter.may_take(seconds)):
            raise PostponedError(f"compiling its float64 twin takes about {seconds:.2g} s")

    @_sparing(float64=True)
    def with_fixed_choices(self) -> ControlRuns | None:
        """Control runs of the region with eager's float64 choices given to it; None if eager makes no choices."""
        given = self.variants.given
        if given is None or not given:
            return None
        arguments, _ = self.call.inputs.fresh(_wide)
        tape = self._recorded()
        wide = Float64Mode(default_dtype=self.variants.default_dtype)
        with self.undisturbed(), torch.no_grad():
            self.call.rng.restore()
            with ReplayRandom(tape), wide, self.call.ambient.entered(), replaying(self.call.exchanges).forward():
                choices = given.choose(*arguments)
        variants = replace(
            self.variants,
            reference=given.eager(choices),
            make_twin=lambda inputs64: given.twin(choices, inputs64),
            given=None,
            make_unfused=None,
            make_again=None,
        )
        call = replace(self.call, final_rng_states=None, meter=None)
        return RegionControlRuns(variants, call, self.cotangents, self.memory)

    @_sparing(float64=True)
    def unfused(self) -> Values | None:
        """The candidate compiled so that it rounds wherever eager does, on the reference's recorded random numbers."""
        return self._of(self.variants.make_unfused)

    @_sparing(float64=True)
    def recompiled(self) -> Values | None:
        """The candidate compiled once more, on the reference's recorded random numbers."""
        return self._of(self.variants.make_again)

    def _of(self, make: Callable[[Sequence[Any]], Region] | None) -> Values | None:
        if make is None:
            return None
        bare, _ = self.call.inputs.fresh()
        with self.undisturbed(), self.call.ambient.entered():
            region = make(bare)
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

    def _run(
        self,
        region: Region,
        *,
        modes: Sequence[Callable[[], Any]],
        wide: bool = False,
        rng: RngState | None = None,
    ) -> Values:
        arguments, leaves = self.call.inputs.fresh(_wide if wide else None)
        cotangents = None if self.cotangents is None else self.cotangents.copied()
        if cotangents is not None and wide:
            cotangents = _promoted(cotangents)
        with self.undisturbed(), ExitStack() as stack:
            (rng or self.call.rng).restore()
            for make in modes:
                stack.enter_context(make())
            replayed = replaying(self.call.exchanges, backward=cotangents is not None)
            with self.call.ambient.entered(), replayed.forward():  # innermost: received tensors are not perturbed
                execution = execute(region, arguments, leaves if cotangents is not None else {})
            if cotangents is None:
                return {**execution.values(self.call.subjects, sorted(self.call.inputs.mutated)), **replayed.values()}
            graph = execution.graph(self.call.inputs.mutated)
            execution.outputs = ()  # frees what the backward pass does not need
            with replayed.backward():
                execution.gradients = graph.backward(cotangents, retain_graph=False)
            return {**execution.gradient_values(self.call.subjects), **replayed.values()}

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Leave the random state as it was after a block."""
        before = RngState.capture(tuple(self.call.rng.cuda))
        try:
            yield
        finally:
            before.restore()


def _wide(values: Sequence[Any]) -> list[Any]:
    """Make the tensors among a region's inputs float64, all together, so that shared memory stays shared."""
    places = [place for place, value in enumerate(values) if isinstance(value, torch.Tensor)]
    wide = list(values)
    for place, tensor in zip(places, to_float64([values[place] for place in places]), strict=True):
        wide[place] = tensor
    return wide


def _promoted(cotangents: Cotangents) -> Cotangents:
    keys = [*cotangents.outputs, *cotangents.mutated]
    wide = to_float64([*cotangents.outputs.values(), *cotangents.mutated.values()])
    count = len(cotangents.outputs)
    return Cotangents(
        dict(zip(keys[:count], wide[:count], strict=True)), dict(zip(keys[count:], wide[count:], strict=True))
    )
