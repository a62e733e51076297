"""Differences of compiled programs that torch documents, or makes on purpose. They are told, and are no failure."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from checked_backend.subjects import Subject

__all__ = ["documented"]

_ANYWHERE: Mapping[str, str] = MappingProxyType(
    {
        "alias.identity": "a compiled program may return another tensor object for the same memory",
        "structure.stride": "a compiler may choose other strides for results; the values are eager's",
    }
)
_GRADIENTS: Mapping[str, str] = MappingProxyType(
    {"structure.type": "AOT autograd gives zeros where eager has no gradient, if an output is not differentiated"}
)


def documented(detail: str, subject: str) -> str:
    """Why a finding is a documented difference; empty if it is none.

    Args:
        detail: Its finer kind.
        subject: What it is about.
    """
    found = _GRADIENTS.get(detail, "") if Subject(subject).is_gradient else ""
    return found or _ANYWHERE.get(detail, "")
