"""Python's call stack in one chunk."""

from __future__ import annotations

import resource
import sys

import pytest

from checked_backend.process.call_stack import with_deep_stack


def page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def leaf(_a: int = 0, _b: int = 0, _c: int = 0, _d: int = 0, _e: int = 0, _f: int = 0, _g: int = 0, _h: int = 0) -> int:
    return max(1, max(2, max(3, max(4, max(5, max(6, max(7, 8)))))))  # a frame no smaller than that of `at`


def at(depth: int) -> int:
    if depth:
        return at(depth - 1)
    before = page_faults()
    for _ in range(500):
        leaf()
    return page_faults() - before


def at_worst() -> int:
    return max(map(at, range(300)))


@pytest.mark.skipif(
    sys.implementation.name != "cpython" or sys.version_info < (3, 11), reason="frames are objects of their own"
)
def test_no_depth_asks_the_system_for_memory_at_every_call() -> None:
    assert at_worst() >= 500
    assert with_deep_stack(lambda: at_worst())() < 100
