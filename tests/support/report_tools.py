"""What the tests of reports share."""

from __future__ import annotations

import io

from checked_backend.findings import Finding, Kind


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


RELU = Finding(
    Kind.LOGIC,
    "output[0]",
    "wrong",
    region="Net [0/0]",
    graph="forward",
    stage="compiled",
    node="relu",
    op="aten.relu.default",
    source="model.py:52 in forward: x.relu()",
)
"""A finding whose operator and line are known."""
