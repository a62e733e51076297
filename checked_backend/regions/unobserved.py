"""Calls of compiled regions that are part of a check themselves: no region checks or counts them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

__all__ = ["is_unobserved", "unobserved"]

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
