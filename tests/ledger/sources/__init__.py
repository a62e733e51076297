"""Where the cases come from: one module for each source, with a function that lists its cases."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tests.ledger.answer import Case
from tests.ledger.sources import (
    calibrated,
    dumps,
    examples,
    localized,
    miscompiles,
    models,
    operators,
    planted,
    policies,
    ranks,
)

__all__ = ["all_cases"]


def all_cases(folder: Path | None) -> Iterator[Case]:
    """Every case, and those of a folder of more."""
    for source in (planted, policies, dumps, calibrated, operators, miscompiles, models, ranks, localized, examples):
        yield from source.cases()
    if folder is not None:
        yield from miscompiles.cases_of(folder)
