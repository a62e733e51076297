"""The command line, ``checked-backend``: `verbs` has a function for each verb, the others do what a verb needs."""

from __future__ import annotations

from checked_backend.cli.verbs import main

__all__ = ["main"]
