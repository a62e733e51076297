"""The name and version of the JSON form of a report.

Version 2 calls ``detection_limit`` and ``own_precision_limit`` what version 1 called ``detection_power`` and
``own_precision_power``. Its findings may have ``more_than_layout``, ``inherited``, ``ignored`` and ``script``.
"""

from __future__ import annotations

from types import MappingProxyType

__all__ = ["LAYOUT_REASONS", "MAX_DEPTH", "READ", "RENAMED", "SCHEMA", "VERSION"]

SCHEMA = "checked_backend.report"
VERSION = 2
READ = (1, 2)
"""Versions that this release reads."""

RENAMED = MappingProxyType({"detection_power": "detection_limit", "own_precision_power": "own_precision_limit"})
"""Names of version 1, and those of version 2 for the same."""

LAYOUT_REASONS = ("depended on", "gradients are lost")
"""What the evidence called why a difference in layout matters, before a finding had ``more_than_layout``."""

MAX_DEPTH = 40  # of evidence: deeper nesting is not something a person wrote down
