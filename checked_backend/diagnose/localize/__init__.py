"""Find out where a failed check goes wrong: the stage of the compiler, the graph, the operator."""

from __future__ import annotations

from checked_backend.diagnose.localize.cut import CallOracle, Cut
from checked_backend.diagnose.localize.locate import Location, locate
from checked_backend.diagnose.localize.subgraph import called_name

__all__ = ["CallOracle", "Cut", "Location", "called_name", "locate"]
