"""How much a check does beyond the program's own calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["THOROUGH", "Effort"]


@dataclass(frozen=True, slots=True)
class Effort:
    """How much a check does beyond the program's own calls.

    Attributes:
        sizes: How many calls with other sizes of the dynamic dimensions there are at most.
        tiles: How many calls with sizes around powers of two there are at most; None: as many as their time allows.
        levels: Whether to find the level at which a failure arises, with the calls compiled again for each level.
        further: Positional arguments of further calls, each with copies of its own: what goes wrong in a later call, or
            writes to what an earlier one was given or has returned, shows there.
        refilled: Positional arguments of calls after those, with their values in the tensors of the first call: what
            remembers a tensor by its address shows there.
    """

    sizes: int = 32
    tiles: int | None = None
    levels: bool = True
    further: Sequence[Sequence[Any]] = ()
    refilled: Sequence[Sequence[Any]] = ()


THOROUGH = Effort()
"""What a program of a user gets."""
