"""Find the parts of a program that Dynamo did not compile, and that therefore ran in eager."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from checked_backend.findings import Skip
from checked_backend.report.dynamo_log import DynamoLog

__all__ = ["Tracing"]

_SUBJECT = "the compiled program"


@dataclass(slots=True)
class Tracing(DynamoLog):
    """The facts about Dynamo's work while a program ran.

    Attributes:
        numpy: Whether Dynamo traced NumPy's functions, which then compute in torch.
    """

    numpy: bool = False

    def not_compiled(self, regions: int) -> Iterator[Skip]:
        """The parts of the program that ran in eager on both sides, so that the comparison shows nothing about them.

        Args:
            regions: How many regions were compiled.
        """
        if regions:
            yield from self.in_eager(_SUBJECT)
        else:
            yield self.no_region(_SUBJECT)

    def between_regions(self) -> str | None:
        """A remark on code that ran in eager between compiled regions; None if there was none."""
        return f"graph breaks, around which the program runs in eager: {self.reasons()}" if self.breaks else None
