"""How much memory there is."""

from __future__ import annotations

import resource
import sys

import pytest

from checked_backend.process.memory import free_memory, memory_limit_lifted, process_limited

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def test_a_limit_of_the_process_counts() -> None:
    before = resource.getrlimit(resource.RLIMIT_AS)
    free = free_memory()
    assert free is not None
    limit = 2**40
    try:
        resource.setrlimit(resource.RLIMIT_AS, (limit, before[1]))
        assert process_limited()
        with memory_limit_lifted() as lifted:
            assert lifted
            assert resource.getrlimit(resource.RLIMIT_AS)[0] == before[1]
        assert resource.getrlimit(resource.RLIMIT_AS)[0] == limit
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert free_memory() is not None
