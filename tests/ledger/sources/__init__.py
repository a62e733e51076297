"""Where the cases come from: one module for each source, with a function that lists its cases."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from types import MappingProxyType

from tests.ledger.answer import Case
from tests.ledger.sources import calibrated, miscompiles, operators, planted

__all__ = ["UNSTABLE", "all_cases"]

UNSTABLE: Mapping[str, str] = MappingProxyType({})
"""Names of answers that are not the same each time, and why."""


def all_cases(folder: Path | None) -> Iterator[Case]:
    """Every case.

    Args:
        folder: A folder of more cases; None for none.
    """
    yield from chain.from_iterable(
        source() for source in (planted.cases, calibrated.cases, operators.cases, miscompiles.cases)
    )
    if folder is not None:
        yield from miscompiles.cases_of(folder)
