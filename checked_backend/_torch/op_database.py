"""Torch's own list of operators with samples of their arguments. It needs expecttest, and takes seconds to import."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any


def operator_database() -> list[Any]:
    """The entries of ``op_db``; none if a module that it needs is not here.

    Hypothesis keeps its profile, where it is loaded. The first call must not be in one of Hypothesis's tests, because
    torch then registers profiles of its own.
    """
    try:
        with _profile_kept():
            from torch.testing._internal.common_methods_invocations import op_db  # noqa: PLC0415  it needs expecttest
    except ImportError:
        return []
    return list(op_db)


@contextlib.contextmanager
def _profile_kept() -> Iterator[None]:
    """Torch's tests choose a profile of Hypothesis when they are imported (``common_utils.py``); undo that."""
    settings = getattr(sys.modules.get("hypothesis"), "settings", None)
    profile = settings.get_current_profile_name() if settings is not None else None
    try:
        yield
    finally:
        if settings is not None and settings.get_current_profile_name() != profile:
            settings.load_profile(profile)
