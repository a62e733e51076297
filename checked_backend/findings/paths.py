"""Paths as people read them."""

from __future__ import annotations

import os

_LIBRARIES = "site-packages/"
_FAR = os.path.join("..", "..", "")


def shown_path(file: str) -> str:
    """The path of a file for people: from the working directory, or of a library from where libraries are installed."""
    _, installed, inside = file.replace(os.sep, "/").rpartition(f"/{_LIBRARIES}")
    if installed:
        return f"{_LIBRARIES}{inside}"
    try:
        near = os.path.relpath(file) if os.path.isabs(file) else file
    except (OSError, ValueError):  # the working directory is gone, or on another drive
        return file
    return file if near.startswith(_FAR) else near


def is_in_library(source: str | None) -> bool:
    """Whether a source line, as findings have it, is of an installed library, and not of the user's own program."""
    return source is not None and source.startswith(_LIBRARIES)
