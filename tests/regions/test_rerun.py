"""What still counts as wrong when a failed call is run again."""

from __future__ import annotations

from dataclasses import replace

from checked_backend import Finding, Kind
from checked_backend.regions.rerun import wrong_like

LOGIC = Finding(Kind.LOGIC, "output[0]", "wrong", "logic")
STRIDE = replace(LOGIC, kind=Kind.STRUCTURE, detail="structure.stride")
SKIPPED = replace(LOGIC, kind=Kind.UNSUPPORTED, detail="unsupported")


def test_a_different_layout_is_wrong_only_where_nothing_else_was() -> None:
    assert wrong_like([LOGIC], [STRIDE, SKIPPED]) == []
    assert wrong_like([LOGIC, STRIDE], [STRIDE, LOGIC]) == [LOGIC]
    assert wrong_like([STRIDE], [STRIDE, SKIPPED]) == [STRIDE]
    severed = replace(STRIDE, more_than_layout="gradients are lost")
    assert wrong_like([LOGIC], [severed]) == [severed]
