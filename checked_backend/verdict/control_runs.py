"""The control runs that the verdict may ask for, as a protocol for whoever can make them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import Enum
from typing import Protocol

import torch

from checked_backend.errors import CheckedBackendError

__all__ = ["Control", "ControlRuns", "MadeElsewhereError", "PostponedError", "Values", "nothing_left_out"]

Values = dict[str, torch.Tensor]


class Control(Enum):
    """The control runs, with what reports call them."""

    REPEAT = "repeated reference"
    BARE = "repeated reference, as it is"
    RESEEDED = "eager on other random numbers"
    ONE_ZERO = "eager with one zero"
    MONTE_CARLO = "Monte Carlo arithmetic"
    SHAPES = "shapes under Monte Carlo arithmetic"
    FLOAT64 = "high-precision reference"
    FLOAT64_NOISE = "float64 noise"
    TWIN = "float64 twin"
    GIVEN_CHOICES = "program given its choices"
    CANDIDATE_AGAIN = "candidate again"
    CANDIDATE_REPLAYED = "candidate on recorded random numbers"
    RECOMPILED = "candidate compiled once more"
    UNFUSED = "candidate that rounds where eager does"
    OTHER_THREADS = "looking for other threads"


def nothing_left_out() -> dict[Control, set[str]]:
    """The value of `ControlRuns.left_out` before any run."""
    return {Control.MONTE_CARLO: set(), Control.FLOAT64: set()}


class MadeElsewhereError(CheckedBackendError):
    """Raised for a control run that another check of the same program makes."""


class PostponedError(CheckedBackendError):
    """Raised for a control run that has not been earned yet (option ``budget``). The values are compared later."""


class ControlRuns(Protocol):
    """The control runs that a check may ask for. Any method may raise; the check then does without that run."""

    def repeat(self, junk: int = 1) -> Values:
        """The reference again, with other junk in uninitialised memory."""

    def bare(self) -> Values:
        """The reference again, as it is, under no dispatch mode: some of torch's own code acts on an active mode."""

    def replay_candidate(self) -> Values:
        """The candidate again, on the reference's recorded random numbers."""

    def rerun_candidate(self) -> Values:
        """The candidate again, drawing its own random numbers from the random state before the call."""

    def reseeded(self, seed: int) -> Values:
        """The reference on other random numbers."""

    def others_drew(self) -> str | None:
        """Evidence that another thread drew random numbers during the checked call; None if there is none."""

    def monte_carlo(self, seed: int, magnitude: float, *, replay_choices: bool = False) -> Values:
        """The reference with every rounding made random; with a magnitude above 1, with correlated sums.

        With ``replay_choices``, the run keeps the reference's choices (indices, comparisons, roundings to integers).
        """

    def high_precision(self, seed: int | None, *, magnitude: float = 1.0, replay_choices: bool = False) -> Values:
        """The reference in float64. With a seed it is perturbed at float64's roundoffs, as in `monte_carlo`."""

    def one_zero(self, *, negative: bool) -> Values:
        """The reference with the same zero wherever an operator may return either."""

    def draws(self) -> bool:
        """Whether the reference draws random numbers."""

    def draws_by_values(self) -> tuple[str, ...]:
        """Operators of the reference whose draws depend on computed values, so that rounding flips some draws."""

    def flips(self, *, in_float64: bool = False) -> bool:
        """Whether any run so far kept a recorded choice where the noise would have chosen otherwise."""

    def left_out(self) -> Mapping[Control, Collection[str]]:
        """For each kind of run, operators whose results the runs so far could not perturb, or compute in float64."""

    def twin(self, *, urgent: bool = True) -> Values:
        """The candidate compiled in float64.

        Args:
            urgent: A tensor lies outside of its noise, so that the comparison must not be postponed.

        Raises:
            PostponedError: The comparison is postponed.
        """

    def with_fixed_choices(self) -> ControlRuns | None:
        """Control runs of the region with eager's float64 choices given to it; None if eager makes no choices."""

    def recompiled(self) -> Values | None:
        """The candidate compiled once more, like the float64 twin but at its own dtypes; None if that is impossible."""

    def unfused(self) -> Values | None:
        """The candidate compiled so that it rounds wherever eager does; None if its compiler has no such mode."""
