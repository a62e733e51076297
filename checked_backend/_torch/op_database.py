"""Torch's own list of operators with samples of their arguments. It needs expecttest, and takes seconds to import."""

from __future__ import annotations

from typing import Any

__all__ = ["operator_database"]


def operator_database() -> list[Any]:
    """The entries of ``op_db``; none if a module that it needs is not here."""
    try:
        from torch.testing._internal.common_methods_invocations import op_db  # noqa: PLC0415  it needs expecttest
    except ImportError:
        return []
    return list(op_db)
