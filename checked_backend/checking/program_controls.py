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
from checked_backend.checking.program import Modes, Outcome, Program, Transform
from checked_backend.modes.choice_tape import ChoiceTape, RecordChoices, ReplayChoices
from checked_backend.modes.float64 import Float64Mode
from checked_backend.modes.monte_carlo import MonteCarloMode, PoisonMode
from checked_backend.modes.random_tape import RandomTape, RecordRandom, ReplayRandom
from checked_backend.regions.compile import eager_graph
from checked_backend.verdict import thresholds
from checked_backend.verdict.control_runs import Control, MadeElsewhereError, Values, nothing_left_out

__all__ = ["ProgramControls"]


@dataclass(slots=True)
class ProgramControls:
    """Control runs of a program in eager.

    The modes are on while the program runs and is differentiated. An optimizer's own arithmetic is the same on both
    sides of a check, so it is not perturbed: the control runs show what it makes of the noise of gradients.

    Attributes:
        numpy: Whether NumPy computes a part of it in eager, where no mode sees it, and torch when compiled.
    """

    program: Program
    numpy: bool = False
    _tapes: list[RandomTape] = field(default_factory=list, init=False)
    _choices: dict[bool, list[ChoiceTape]] = field(default_factory=dict, init=False)  # by whether in float64
    _held: dict[bool, list[ReplayChoices]] = field(default_factory=lambda: {False: [], True: []}, init=False)
    _recorded: bool = field(default=False, init=False)
    _left_out: Mapping[Control, set[str]] = field(default_factory=nothing_left_out, init=False)
    _in_float64: tuple[Values, Values] | None = field(default=None, init=False)
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

    def same_in_float64(self, index: int, subject: str) -> bool | None:
        """Whether a tensor after a call is the same in Dynamo's graphs if they run in float64, as the program does.

        Dynamo may compute in another way than Python. For example, torch's optimizers compute with Python's numbers in
        eager, and with float32 tensors when they are compiled. None if the program does not run in float64.
        """
        if self._in_float64 is None:
            try:
                reference = self.high_precision(None)
                traced = self._values(self.program.run_all(self._traced.under(Float64Mode()), wide=True))
                self._in_float64 = reference, traced
            except Exception:  # any such error is about float64, not about the program
                self._in_float64 = {}, {}
        reference, traced = self._in_float64
        place = in_step(index, subject)
        names = [name for name in reference.keys() & traced.keys() if name.startswith(place)]
        return all(_same(reference[name], traced[name]) for name in names) if names else None

    def _made_elsewhere(self, *_given: Any, **_options: Any) -> Any:
        """Each region makes it: Dynamo compiles nothing while a dispatch mode is active."""
        raise MadeElsewhereError("made for each region instead")

    replay_candidate = rerun_candidate = reseeded = others_drew = one_zero = twin = _made_elsewhere

    def _never_made(self) -> None:
        """Each region makes it, as it can."""

    with_fixed_choices = recompiled = unfused = _never_made

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
                values |= {in_step(index, name): tensor for name, tensor in outcome.values.items()}
        if not values and outcomes and outcomes[0].error is not None:
            raise outcomes[0].error
        return values


class _Traced:
    """The graphs that Dynamo traces from a function, run in eager under a mode.

    They are of one function only, and under all modes the same, because Dynamo's compiled code is used again.
    """

    def __init__(self) -> None:
        self._mode: AbstractContextManager[Any] = nullcontext()

    def under(self, mode: AbstractContextManager[Any]) -> Transform:
        self._mode = mode
        return partial(torch.compile, backend=self._compile)

    def _compile(self, gm: fx.GraphModule, _example_inputs: Sequence[Any]) -> Callable[..., Any]:
        traced = eager_graph(gm).forward

        def run(*args: Any) -> Any:
            with self._mode:
                return traced(*args)

        return run


def _same(reference: torch.Tensor, traced: torch.Tensor) -> bool:
    if reference.shape != traced.shape or reference.dtype != traced.dtype:
        return False
    if not (reference.is_floating_point() or reference.is_complex()):
        return torch.equal(reference, traced)
    if not bool(reference.isfinite().all()):
        return False  # two that are NaN or infinite in float64 agree whatever else they compute
    size = float(reference.abs().mean()) if reference.numel() else 0.0
    return torch.allclose(
        reference, traced, rtol=thresholds.TWIN_TOLERANCE, atol=thresholds.TWIN_TOLERANCE * size, equal_nan=True
    )
