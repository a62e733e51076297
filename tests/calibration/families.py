"""All families."""

from __future__ import annotations

from . import families_blocks, families_losses, families_nets, families_sums
from .family import Family

FAMILIES: dict[str, Family] = {
    each.name: each
    for module in (families_blocks, families_nets, families_losses, families_sums)
    for each in module.FAMILIES
}
