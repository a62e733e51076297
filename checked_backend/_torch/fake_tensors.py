"""Fake tensors, which have metadata and no data. Torch traces with them."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
    disable_fake_tensor_cache,
)
from torch.fx.experimental.symbolic_shapes import ShapeEnv

__all__ = [
    "FakeTensor",
    "FakeTensorMode",
    "ShapeEnv",
    "UnsupportedOperatorException",
    "detect_fake_mode",
    "disable_fake_tensor_cache",
    "fake_errors_unlogged",
    "fake_refusals",
    "fakes_of_fixed_sizes",
]


def fake_refusals() -> tuple[type[Exception], ...]:
    """The exceptions that fake tensors raise for an operator whose sizes or results depend on data."""
    return (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)


def fakes_of_fixed_sizes(values: Sequence[Any]) -> tuple[FakeTensorMode, list[Any]]:
    """Fake tensors like the given ones, without symbols for their sizes; and their mode. Other values stay."""
    mode = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True, allow_non_fake_inputs=True)
    return mode, [
        mode.from_tensor(value, static_shapes=True) if isinstance(value, torch.Tensor) else value for value in values
    ]


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
