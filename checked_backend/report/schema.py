"""The name and version of the JSON form of a report."""

from __future__ import annotations

__all__ = ["MAX_DEPTH", "SCHEMA", "VERSION"]

SCHEMA = "checked_backend.report"
VERSION = 1
MAX_DEPTH = 40  # of evidence: deeper nesting is not something a person wrote down
