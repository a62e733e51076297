"""The code that a compiler generated for the operator of a finding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import AfterValidator, Field, WithJsonSchema

from checked_backend.findings.pictures import MOST_NODES
from checked_backend.findings.values import Count

__all__ = ["MOST_CODE", "Kernel"]

MOST_CODE = 2**17  # characters


def _bounded(code: str) -> str:
    if len(code) > MOST_CODE:  # pydantic itself counts the characters of valid UTF-8 alone
        raise ValueError(f"expected at most {MOST_CODE} characters")
    return code


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel that computes an operator, with its source.

    Attributes:
        name: Its name in the generated code; or that of the library function that the generated code calls.
        language: What the source is written in: ``C++``, ``Triton``, ...; ``call`` if it is the call of a library
            function.
        code: The source; the beginning of a long one.
        lines_left_out: How many more lines it has.
        computes: The nodes of the compiled graph that it computes, the operator among them.
        others: Further kernels that compute the operator again.
    """

    name: str
    language: str
    code: Annotated[str, AfterValidator(_bounded), WithJsonSchema({"type": "string", "maxLength": MOST_CODE})]
    lines_left_out: Count = 0
    computes: Annotated[tuple[str, ...], Field(max_length=MOST_NODES)] = ()
    others: Annotated[tuple[str, ...], Field(max_length=MOST_NODES)] = ()
