"""Control runs of a whole program: all its calls, with their backward passes and optimizer steps, again."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import fx

from checked_backend.checking.compare_runs import in_step
from checked_backend.checking.program import Modes, Outcome, Program
from checked_backend.modes.choice_tape import ChoiceTape, RecordChoices, ReplayChoices
from checked_backend.modes.float64 import Float64Mode
from checked_backend.modes.monte_carlo import MonteCarloMode, PoisonMode
from checked_backend.modes.random_tape import RandomTape, RecordRandom, ReplayRandom
from checked_backend.regions.compile import eager_graph
from checked_backend.verdict.control_runs import Control, MadeElsewhereError, Values, nothing_left_out

__all__ = ["ProgramControls"]


@dataclass(slots=True)
class ProgramControls:
    """Control runs of a program in eager.

    The modes are on while the program runs and is differentiated. An optimizer's own arithmetic is the same on both
    sides of a check, so it is not perturbed: the control runs show what it makes of the noise of gradients.

    Attributes:
        program: The program.
        numpy: Whether NumPy computes a part of it in eager, where no mode sees it, and torch when compiled.
    """

    program: Program
    numpy: bool = False
    _tapes: list[RandomTape] = field(default_factory=list, init=False)
    _choices: dict[bool, list[ChoiceTape]] = field(default_factory=dict, init=False)  # by whether in float64
    _held: dict[bool, list[ReplayChoices]] = field(default_factory=lambda: {False: [], True: []}, init=False)
    _recorded: bool = field(default=False, init=False)
    _left_out: Mapping[Control, set[str]] = field(default_factory=nothing_left_out, init=False)
    _traced: _Traced = field(default_factory=lambda: _Traced(), init=False)

    def repeat(self, junk: int = 1) -> Values:
        """Eager again, with junk in uninitialised memory; records random tapes, one for each evaluation."""
        tapes: list[RandomTape] = []
        choices: list[ChoiceTape] = []
        poison = PoisonMode(junk)

        def modes(_number: int) -> Sequence[AbstractContextManager[Any]]:
            tapes.append(RandomTape())
            choices.append(ChoiceTape())
            return RecordRandom(tapes[-1]), RecordChoices(choices[-1]), poison

        values = self._values(self.program.run_all(modes=modes))
        self._tapes, self._choices[False], self._recorded = tapes, choices, True
        return values

    def bare(self) -> Values:
        """Eager again, under no mode."""
        return self._values(self.program.run_all())

    def replay_candidate(self) -> Values:
        """Not made: Dynamo compiles nothing while a dispatch mode is active. Each region makes its own."""
        raise MadeElsewhereError("made for each region instead")

    def rerun_candidate(self) -> Values:
        """Not made: only what `replay_candidate` finds needs it."""
        raise MadeElsewhereError("made for each region instead")

    def reseeded(self, seed: int) -> Values:
        """Not made: only what `replay_candidate` finds needs it."""
        raise MadeElsewhereError("made for each region instead")

    def others_drew(self) -> str | None:
        """Not made: only what `replay_candidate` finds needs it."""
        raise MadeElsewhereError("made for each region instead")

    def monte_carlo(self, seed: int, magnitude: float, *, replay_choices: bool = False) -> Values:
        """Eager with every operator's result perturbed."""
        noise = MonteCarloMode(seed, magnitude, correlated=magnitude > 1)
        if self.numpy:
            return self._moved_as_in_torch(noise)
        values = self._values(self.program.run_all(modes=self._replaying(noise, replay_choices=replay_choices)))
        self._left_out[Control.MONTE_CARLO] |= noise.unperturbed
        return values

    def _moved_as_in_torch(self, noise: MonteCarloMode) -> Values:
        """Eager's values, moved by the effect of the noise on the same program with torch in place of NumPy.

        Where that other program is not finite even without noise, eager's value stays.
        """
        quiet, noisy = (self._values(self.program.run_all(self._traced.under(mode))) for mode in (nullcontext(), noise))
        values = self._values(self.program.run_all())
        for name in values.keys() & quiet.keys() & noisy.keys():
            eager, still, moved = values[name], quiet[name], noisy[name]
            if eager.dtype == torch.bool:
                values[name] = torch.where(moved == still, eager, moved)
            elif eager.shape == still.shape == moved.shape and eager.dtype == still.dtype == moved.dtype:
                values[name] = torch.where(still.isfinite(), eager + (moved - still), eager)
        return values

    def high_precision(self, seed: int | None, *, magnitude: float = 1.0, replay_choices: bool = False) -> Values:
        """Eager in float64."""
        if seed is not None:
            noise = MonteCarloMode(seed, magnitude, correlated=True)
            modes = self._replaying(noise, replay_choices=replay_choices, in_float64=True)
            return self._values(self.program.run_all(modes=modes, wide=True))
        choices: list[ChoiceTape] = []
        wide: list[Float64Mode] = []
        under = self._replaying(in_float64=True)

        def recording(number: int) -> Sequence[AbstractContextManager[Any]]:
            choices.append(ChoiceTape())
            modes = under(number)
            wide.extend(mode for mode in modes if isinstance(mode, Float64Mode))
            return RecordChoices(choices[-1]), *modes

        values = self._values(self.program.run_all(modes=recording, wide=True))
        self._left_out[Control.FLOAT64].update(*(mode.lossy for mode in wide))
        self._choices[True] = choices
        return values

    def one_zero(self, *, negative: bool) -> Values:
        """Not made of a whole program: each region makes its own."""
        raise MadeElsewhereError("made for each region instead")

    def draws(self) -> bool:
        """Whether eager draws random numbers."""
        return any(not tape.empty for tape in self._tapes)

    def draws_by_values(self) -> tuple[str, ...]:
        """Operators whose draws depend on computed values."""
        return tuple(op for tape in self._tapes for op in tape.by_values)

    def flips(self, *, in_float64: bool = False) -> bool:
        """Whether any run kept a recorded choice where the noise would have chosen otherwise."""
        return any(hold.flips for hold in self._held[in_float64])

    def left_out(self) -> Mapping[Control, Collection[str]]:
        """Operators whose results the runs so far could not perturb, or not compute in float64."""
        return self._left_out

    def with_fixed_choices(self) -> None:
        """Not made of a whole program: each region makes its own."""

    def traced_in_float64(self) -> Values:
        """The graphs that Dynamo makes of the program, run in float64."""
        return self._values(self.program.run_all(self._traced.under(Float64Mode()), wide=True))

    def twin(self, *, urgent: bool = True) -> Values:
        """Not made of a whole program: each region makes its own."""
        del urgent
        raise MadeElsewhereError("made for each region instead")

    def recompiled(self) -> Values | None:
        """Not made of a whole program: each region makes its own."""
        return None

    def unfused(self) -> Values | None:
        """Not made of a whole program: each region makes its own."""
        return None

    def _replaying(self, *noise: MonteCarloMode, replay_choices: bool = False, in_float64: bool = False) -> Modes:
        if not self._recorded:
            self.repeat()
        wide = (Float64Mode(),) if in_float64 else ()

        def under(number: int) -> Sequence[AbstractContextManager[Any]]:
            # A perturbed run may evaluate its loss more often than the recorded one. Then it draws for itself.
            if number >= len(self._tapes):
                return *noise, *wide
            replay = ReplayRandom(self._tapes[number])
            choices = self._choices.get(in_float64, ()) if replay_choices else ()
            if number >= len(choices):
                return replay, *noise, *wide
            hold = ReplayChoices(choices[number])
            self._held[in_float64].append(hold)
            # after the noise, so that it does not see the parts of an operator that the noise takes apart
            return replay, *noise, hold, *wide

        return under

    def _values(self, outcomes: Sequence[Outcome]) -> Values:
        values: Values = {}
        for index, outcome in enumerate(outcomes):
            if outcome.error is None:
                values |= {in_step(index, name): tensor for name, tensor in outcome.tensors().items()}
        if not values and outcomes and outcomes[0].error is not None:
            raise outcomes[0].error
        return values


class _Traced:
    """Turns a function into the graphs that Dynamo traces from it, run in eager under a mode."""

    def __init__(self) -> None:
        self._mode: AbstractContextManager[Any] = nullcontext()

    def under(self, mode: AbstractContextManager[Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """A transform for functions. It is for one function only, because Dynamo's compiled code is used again."""
        self._mode = mode
        return partial(torch.compile, backend=self._compile)

    def _compile(self, gm: fx.GraphModule, _example_inputs: Sequence[Any]) -> Callable[..., Any]:
        traced = eager_graph(gm).forward

        def run(*args: Any) -> Any:
            with self._mode:
                return traced(*args)

        return run
