"""The name and version of the JSON form of a report."""

from __future__ import annotations

__all__ = [
    "GREATEST",
    "MAX_DEPTH",
    "MOST_BLOCKS",
    "MOST_CODE",
    "MOST_DIMENSIONS",
    "MOST_ELEMENTS",
    "MOST_NODES",
    "MOST_ULPS",
    "SCHEMA",
    "VERSION",
]

SCHEMA = "checked_backend.report"
VERSION = 2

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
