"""The user's choices for generated programs, and how a random one is made."""

from __future__ import annotations

import random
from dataclasses import dataclass

__all__ = ["Choices", "chance"]


@dataclass(frozen=True, slots=True)
class Choices:
    """The user's choices for generated programs.

    Attributes:
        ops: Patterns of names of operations, as in a shell; empty for all.
        dtypes: Dtypes of inputs; empty for all.
        training: Whether programs are differentiated; None for some.
        dynamic: Whether sizes are symbolic; None for some.
        longest: The greatest number of calls.
    """

    ops: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    training: bool | None = None
    dynamic: bool | None = None
    longest: int = 8


def chance(rng: random.Random, probability: float) -> bool:
    """Whether something of this probability happens. It does not for the least number, which is the simplest choice."""
    return rng.random() >= 1 - probability
