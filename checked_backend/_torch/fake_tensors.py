"""Fake tensors, which have metadata and no data. Torch traces with them."""

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
    "UnsupportedOperatorException",
    "detect_fake_mode",
    "disable_fake_tensor_cache",
    "fake_errors_unlogged",
    "fake_refusals",
]


def fake_refusals() -> tuple[type[Exception], ...]:
    """The exceptions that fake tensors raise for an operator whose sizes or results depend on data."""
    return (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)


@contextmanager
def fake_errors_unlogged() -> Iterator[None]:
    """Keep torch from logging a traceback for each exception of a fake kernel, where such exceptions are expected."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before = logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = before
