"""Fake tensors: what torch traces with."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
    disable_fake_tensor_cache,
)

__all__ = [
    "FakeTensor",
    "FakeTensorMode",
    "detect_fake_mode",
    "disable_fake_tensor_cache",
    "fake_errors_unlogged",
    "fake_refusals",
]


def fake_refusals() -> tuple[type[Exception], ...]:
    """What fake tensors raise for an operator whose sizes or results depend on data."""
    return (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)


@contextmanager
def fake_errors_unlogged() -> Iterator[None]:
    """Where sizes that do not fit are expected: torch logs what a fake kernel raises, with a traceback."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before = logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = before
