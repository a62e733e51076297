"""Where the cases come from: one module for each source, with a function that lists its cases."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

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

__all__ = ["UNSTABLE", "all_cases"]

_SOURCES = (planted, policies, dumps, calibrated, operators, miscompiles, models, ranks, localized, examples)

UNSTABLE: Mapping[str, str] = MappingProxyType(
    {
        "faults/returns too early/float32::numcheck": "a thread writes the results late, before or after they are read",
    }
)
"""Names of answers that are not the same each time, and why."""


def all_cases(folder: Path | None) -> Iterator[Case]:
    """Every case.

    Args:
        folder: A folder of more cases; None for none.
    """
    for source in _SOURCES:
        yield from source.cases()
    if folder is not None:
        yield from miscompiles.cases_of(folder)
