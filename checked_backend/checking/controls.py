"""Control runs of a whole program."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from checked_backend.checking.program import Outcome, Program
from checked_backend.errors import CheckedBackendError
from checked_backend.interpret.perturb import MonteCarloMode, PoisonMode
from checked_backend.interpret.promote import HighPrecisionMode
from checked_backend.interpret.random import RandomTape, RecordRandom, ReplayRandom
from checked_backend.regions.controls import Values

__all__ = ["ProgramControls"]


class ControlError(CheckedBackendError):
    """A control run that cannot be made of a whole program."""


@dataclass(slots=True)
class ProgramControls:
    """Control runs of a program in eager.

    Attributes:
        program: The program.
        compiled: Runs the compiled program under modes.
    """

    program: Program
    compiled: Callable[[Callable[..., Any]], Callable[..., Any]]
    _tape: RandomTape | None = field(default=None, init=False)

    def repeat(self) -> Values:
        """Eager again, with junk in uninitialised memory; records the random tape."""
        tape = RandomTape()
        values = _values(self.program.run(modes=(lambda: RecordRandom(tape), lambda: PoisonMode(1))))
        self._tape = tape
        return values

    def repeat_candidate(self) -> Values:
        """Not made: Dynamo compiles nothing while a dispatch mode is active; each region makes its own."""
        raise ControlError("made for each region instead")

    def candidate_alone(self) -> Values:
        """Not made: only what `repeat_candidate` finds needs it."""
        raise ControlError("made for each region instead")

    def monte_carlo(self, seed: int, magnitude: float) -> Values:
        """Eager with every operator's result perturbed."""
        tape = self._recorded()
        return _values(
            self.program.run(
                modes=(lambda: ReplayRandom(tape), lambda: MonteCarloMode(seed, magnitude, correlated=magnitude > 1))
            )
        )

    def high_precision(self, seed: int | None) -> Values:
        """Eager in float64."""
        tape = self._recorded()
        modes: list[Callable[[], Any]] = [lambda: ReplayRandom(tape)]
        if seed is not None:
            modes.append(lambda: MonteCarloMode(seed, correlated=True))
        modes.append(HighPrecisionMode)
        return _values(self.program.run(modes=modes, wide=True))

    def twin(self) -> Values:
        """Not made of a whole program: each region makes its own."""
        raise ControlError("made for each region instead")

    def unfused(self) -> Values | None:
        """Not made of a whole program: each region makes its own."""
        return None

    def _recorded(self) -> RandomTape:
        if self._tape is None:
            self.repeat()
        if self._tape is None:
            raise ControlError("the program's random numbers were not recorded")
        return self._tape


def _values(outcome: Outcome) -> Values:
    if outcome.error is not None:
        raise outcome.error
    return outcome.tensors()
