"""What Dynamo made of the program's code, and what of it ran in eager therefore."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from checked_backend.findings import Skip
from checked_backend.report.dynamo_log import DynamoLog

__all__ = ["Tracing"]

_SUBJECT = "the compiled program"


@dataclass(slots=True)
class Tracing(DynamoLog):
    """What Dynamo did while a program ran.

    Attributes:
        numpy: Whether it traced NumPy's functions, which compute in torch then.
    """

    numpy: bool = False

    def not_compiled(self, regions: int) -> Iterator[Skip]:
        """What of the program ran in eager on both sides, so that the comparison shows nothing of it.

        Args:
            regions: How many regions were compiled.
        """
        if regions:
            yield from self.in_eager(_SUBJECT)
        else:
            yield self.no_region(_SUBJECT)

    def between_regions(self) -> str | None:
        """A remark on what ran in eager between compiled regions; None if nothing did."""
        return f"graph breaks, around which the program runs in eager: {self.reasons()}" if self.breaks else None
