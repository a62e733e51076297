"""Repros of these tests are tried in forks of a warm Python: importing torch for each is most of what they cost."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def warm(request: pytest.FixtureRequest) -> None:
    if any(map(request.node.get_closest_marker, ("process", "slow"))):
        request.getfixturevalue("warm_repros")
