"""How far a failure could be tracked down."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import fx

from checked_backend.diagnose.localize.cut import Cut
from checked_backend.findings import NodeError

__all__ = ["Location"]


@dataclass(frozen=True, slots=True)
class Location:
    """How far a failure could be tracked down.

    Attributes:
        stage: The first stage that is wrong: ``aot``, ``decomposed``, ``partitioned`` or ``compiled``.
        graph: Which graph: ``forward``, ``backward`` or ``inference``; None if it is not known.
        node: The operator that errs.
        op: Its name in ATen: the operator to which the user's call comes down.
        within: How the node is related to the operator of the user's graph, if a decomposition made the node.
        message: The difference of its result, as text.
        cut: A small case that fails.
        notes: The steps that were tried, and why the search went no further.
        gross: Whether the cut only fails for the oracle of gross errors.
        again: Whether the operator was found in another region before, and is wrong here too.
        flow: Measures how the error flows through the graph; None if that cannot be done.
    """

    stage: str
    graph: str | None = None
    node: fx.Node | None = None
    op: str | None = None
    within: str | None = None
    message: str = ""
    cut: Cut | None = None
    notes: tuple[str, ...] = ()
    gross: bool = False
    again: bool = False
    flow: Callable[[], tuple[NodeError, ...]] | None = None
