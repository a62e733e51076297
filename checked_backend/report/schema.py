"""The name and version of the JSON form of a report.

Version 2 calls ``detection_limit`` and ``own_precision_limit`` what version 1 called ``detection_power`` and
``own_precision_power``. It names evidence by the identifiers of `EvidenceKey`, where older files had phrases. What code
reads of a finding is a member of it: ``more_than_layout``, ``inherited``, ``ignored``, ``script``, ``at_fault``,
``explains``, ``ranks``, ``searched``, ``repro_confirmed``, ``workaround_confirmed``. The numbers of pictures are
``distribution`` and ``flow``, generated code is ``kernel``. Files of version 2 from before its first release lack some
of these, and are read too.
"""

from __future__ import annotations

from types import MappingProxyType

__all__ = [
    "GREATEST",
    "MAX_DEPTH",
    "MOST_BLOCKS",
    "MOST_CODE",
    "MOST_DIMENSIONS",
    "MOST_ELEMENTS",
    "MOST_NODES",
    "MOST_ULPS",
    "READ",
    "RENAMED",
    "SCHEMA",
    "VERSION",
]

SCHEMA = "checked_backend.report"
VERSION = 2
READ = (1, 2)
"""Versions that this release reads."""

RENAMED = MappingProxyType({"detection_power": "detection_limit", "own_precision_power": "own_precision_limit"})
"""Names of version 1, and those of version 2 for the same."""

MAX_DEPTH = 40  # of evidence: deeper nesting is not something a person wrote down

GREATEST = 2**64  # no count and no element of a tensor is greater

# Limits on the numbers of pictures, and on code. A file may have a little more than this release writes, for the sake
# of later ones.
MOST_BLOCKS = 64  # in each direction
MOST_CODE = 2**17  # characters
MOST_DIMENSIONS = 64
MOST_ELEMENTS = 64
MOST_NODES = 400
MOST_ULPS = 80
