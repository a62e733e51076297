"""Runs of a whole program for its check: all its calls, with their backward passes and optimizer steps, again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import fx

from checked_backend.checking.program import Outcome, Program, Transform, in_step
from checked_backend.modes.float64 import Float64Mode
from checked_backend.regions.compile import eager_graph
from checked_backend.regions.runner import EagerTape, learn, noise_of
from checked_backend.verdict import thresholds
from checked_backend.verdict.runner import FLOAT64, REPEAT, Build, Control, Facts, MadeElsewhereError, Recipe, Values


@dataclass(slots=True)
class ProgramRunner:
    """Runs a program in eager once more, or a handwritten candidate in its place.

    Each region runs what is compiled, since Dynamo does nothing under a mode.

    The modes are on while the program runs and is differentiated. An optimizer's own arithmetic is the same on both
    sides of a check, so it is not perturbed: the control runs show what it makes of the noise of gradients.
    """

    program: Program
    facts: Facts = field(default_factory=Facts, init=False)
    _tapes: list[EagerTape] = field(default_factory=list, init=False)  # one for each evaluation
    _in_float64: tuple[Values, Values] | None = field(default=None, init=False)
    _traced: Traced = field(default_factory=lambda: Traced(), init=False)

    def run(self, recipe: Recipe) -> Values | None:
        """All calls once more.

        Raises:
            MadeElsewhereError: Each region makes this run.
        """
        candidate = self.program.candidate if recipe.build is not Build.EAGER else None
        if candidate is not None and recipe.build is not Build.COMPILED:
            return None  # it is what it is, and may know no float64
        if (candidate is None and recipe.build is not Build.EAGER) or recipe.control is Control.ONE_ZERO:
            raise MadeElsewhereError("made for each region instead")
        noise, facts = noise_of(recipe), self.facts
        if recipe.control is Control.MONTE_CARLO and self.program.numpy:
            return self._moved_as_in_torch(noise or nullcontext())
        if recipe.replays_draws and not self._tapes:
            self.run(REPEAT)
        ran: list[tuple[EagerTape, Sequence[AbstractContextManager[Any]]]] = []

        def modes(number: int) -> Sequence[AbstractContextManager[Any]]:
            # a perturbed run may evaluate its loss more often than the recorded one; then it draws for itself
            known = self._tapes[number] if number < len(self._tapes) else EagerTape()
            tape = known.of_run(recipe)
            ran.append((tape, tape.modes(recipe, noise)))
            return ran[-1][1]

        transform = None if candidate is None else torch.compile  # which is not asked: a candidate runs as it is
        values = self._values(self.program.run_all(transform, modes=modes, wide=recipe.float64))
        if recipe.records_choices:
            self._tapes = [*(tape for tape, _ in ran), *self._tapes[len(ran) :]]
            draws = [tape.draws for tape in self._tapes if tape.draws is not None]
            facts.draws = not all(one.empty for one in draws)
            facts.draws_by_values = tuple(op for one in draws for op in one.by_values)
        for tape, used in ran:
            learn(facts, recipe, tape, used)
        return values

    def others_drew(self) -> None:
        """Each region finds out whether another thread drew random numbers."""

    def _moved_as_in_torch(self, noise: AbstractContextManager[Any]) -> Values:
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

    def same_in_float64(self, index: int, subject: str) -> bool | None:
        """Whether a tensor after a call is the same in Dynamo's graphs if they run in float64, as the program does.

        Dynamo may compute in another way than Python. For example, torch's optimizers compute with Python's numbers in
        eager, and with float32 tensors when they are compiled. None if the program does not run in float64.
        """
        if self._in_float64 is None:
            try:
                reference = self.run(FLOAT64) or {}
                traced = self._values(self.program.run_all(self._traced.under(Float64Mode()), wide=True))
                self._in_float64 = reference, traced
            except Exception:  # any such error is about float64, not about the program
                self._in_float64 = {}, {}
        reference, traced = self._in_float64
        place = in_step(index, subject)
        names = [name for name in reference.keys() & traced.keys() if name.startswith(place)]
        return all(_same(reference[name], traced[name]) for name in names) if names else None

    def _values(self, outcomes: Sequence[Outcome]) -> Values:
        values: Values = {}
        for index, outcome in enumerate(outcomes):
            if outcome.error is None:
                values |= {in_step(index, name): tensor for name, tensor in outcome.values.items()}
        if not values and outcomes and outcomes[0].error is not None:
            raise outcomes[0].error
        return values


class Traced:
    """The graphs that Dynamo traces from a function, run in eager under a mode.

    They are of one function only, and under all modes the same, because Dynamo's compiled code is used again.
    """

    def __init__(self, dynamic: bool | None = None) -> None:
        self._dynamic = dynamic
        self._mode: AbstractContextManager[Any] = nullcontext()

    def under(self, mode: AbstractContextManager[Any]) -> Transform:
        """The transform that makes a function into these graphs."""
        self._mode = mode
        return partial(torch.compile, backend=self._compile, dynamic=self._dynamic)

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
