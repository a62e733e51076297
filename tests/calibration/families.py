"""All families."""

from __future__ import annotations

from . import families_blocks, families_losses, families_nets
from .family import Family

__all__ = ["FAMILIES"]

FAMILIES: dict[str, Family] = {
    each.name: each for each in (*families_blocks.FAMILIES, *families_nets.FAMILIES, *families_losses.FAMILIES)
}
