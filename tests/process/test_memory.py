"""How much memory there is, and Python's call stack in one chunk."""

from __future__ import annotations

import resource
import sys

import pytest

from checked_backend.process.memory import free_memory, memory_limit_lifted, process_limited, with_deep_stack
from checked_backend.regions.build import build_region
from checked_backend.regions.operator_check.check import OperatorCheck
from checked_backend.regions.runner import RegionRunner

CALLS = 500


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
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


def leaf(_a: int = 0, _b: int = 0, _c: int = 0, _d: int = 0, _e: int = 0, _f: int = 0, _g: int = 0, _h: int = 0) -> int:
    return max(1, max(2, max(3, max(4, max(5, max(6, max(7, 8)))))))  # a frame no smaller than that of `faults_at`


def faults_at(depth: int) -> int:
    """Page faults of so many calls, below so many others."""
    if depth:
        return faults_at(depth - 1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(CALLS):
        leaf()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.mark.skipif(sys.version_info < (3, 11), reason="frames are objects of their own")
def test_no_depth_asks_the_system_for_memory_at_every_call() -> None:
    assert max(map(faults_at, range(300))) >= CALLS
    assert with_deep_stack(lambda: max(map(faults_at, range(300))))() < CALLS / 5
    for function in (build_region, OperatorCheck.run, RegionRunner._run):
        assert function.__code__.co_stacksize > 2**16
