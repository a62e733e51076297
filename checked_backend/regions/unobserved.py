"""Calls of compiled regions that are no calls of the program's: no region checks or counts them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from checked_backend._torch.fake_tensors import FakeTensor

__all__ = ["is_traced", "is_unobserved", "unobserved"]

_unobserved: ContextVar[bool] = ContextVar("checked_backend_unobserved", default=False)


@contextmanager
def unobserved() -> Iterator[None]:
    """A block in which regions run what was compiled, and look at nothing."""
    token = _unobserved.set(True)
    try:
        yield
    finally:
        _unobserved.reset(token)


def is_unobserved() -> bool:
    """Whether such a block runs."""
    return _unobserved.get()


def is_traced(args: Sequence[Any]) -> bool:
    """Whether a compiler calls a region while it compiles, to see what it returns: its tensors have no values.

    Dynamo does so where it splits the graph of a ``DistributedDataParallel`` module between two buckets.
    """
    return any(isinstance(arg, FakeTensor) for arg in args)
