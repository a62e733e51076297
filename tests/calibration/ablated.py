"""Run tests with one mechanism of the verdict switched off, to see which of them need it.

``pytest -p tests.calibration.ablated --without "lost digits" tests/verdict`` lists the failing tests. They are programs
whose verdict rests on the mechanism, which a sample of the calibration may not hold.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .ablation import MECHANISMS


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--without``."""
    parser.addoption("--without", choices=list(MECHANISMS), help="the mechanism to switch off")


@pytest.fixture(autouse=True)
def _switched_off(request: pytest.FixtureRequest) -> Iterator[None]:
    name = request.config.getoption("--without")
    if name is None:
        yield
        return
    with MECHANISMS[name]():
        yield
