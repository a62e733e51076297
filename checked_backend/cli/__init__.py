"""The command line, ``checked-backend``: `verbs` has a function for each verb; the other modules help them."""

from __future__ import annotations

from checked_backend.cli.verbs import main

__all__ = ["main"]
