"""Paths as people read them."""

from __future__ import annotations

import os

__all__ = ["shown_path"]

_FAR = os.path.join("..", "..", "")


def shown_path(file: str) -> str:
    """The path of a file for people: from the working directory, or of a library from where it is installed."""
    _, installed, inside = file.replace(os.sep, "/").rpartition("/site-packages/")
    if installed:
        return inside
    try:
        near = os.path.relpath(file) if os.path.isabs(file) else file
    except (OSError, ValueError):  # the working directory is gone, or on another drive
        return file
    return file if near.startswith(_FAR) else near
