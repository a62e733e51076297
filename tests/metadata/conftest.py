"""A library of operators for one test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.support.lying_operators import library_of_lies


@pytest.fixture
def library() -> Iterator[torch.library.Library]:
    with library_of_lies() as library:
        yield library
