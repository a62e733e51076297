"""How much a check does beyond the program's own calls."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["THOROUGH", "Effort"]


@dataclass(frozen=True, slots=True)
class Effort:
    """How much a check does beyond the program's own calls.

    Attributes:
        sizes: How many calls with other sizes of the dynamic dimensions there are at most.
        tiles: How many calls with sizes around powers of two there are at most; None: as many as their time allows.
        levels: Whether to find the level at which a failure arises, with the calls compiled again for each level.
    """

    sizes: int = 32
    tiles: int | None = None
    levels: bool = True


THOROUGH = Effort()
"""What a program of a user gets."""
