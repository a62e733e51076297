"""Numbers for pictures of a finding, and generated code. They are made where it is made, and bounded in size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import AfterValidator, Field, WithJsonSchema

from checked_backend.findings.values import Count, Index, Number, Real

# A file may have a little more than this release writes, for the sake of later ones.
MOST_NODES = 400
MOST_CODE = 2**17  # characters
_MOST_BLOCKS = 64  # in each direction
_MOST_ELEMENTS = 64
_MOST_ULPS = 80


@dataclass(frozen=True, slots=True)
class WorstElement:
    """One of the elements that differ most.

    Attributes:
        index: Where it is.
        expected: Eager's value.
        actual: The compiled program's value.
        float64: Eager's value in float64; None if it is not known.
    """

    index: Index
    expected: Number
    actual: Number
    float64: Number | None = None


@dataclass(frozen=True, slots=True)
class Distribution:
    """The distribution of differences in a tensor, by place and by size.

    Attributes:
        matrix: The rows and columns of the matrix that is drawn. Its columns are the tensor's last dimension; a tensor
            of one dimension is folded.
        blocks: The greatest absolute difference in each block of that matrix; infinite where NaN or infinity is on one
            side only.
        ulps: How many elements differ by how many representable numbers: by none, by 1, by 2 to 3, by 4 to 7, and so
            on. Empty if the dtype has no such distance.
        worst: The elements that differ most, the worst first.
    """

    shape: Index
    matrix: tuple[Count, Count]
    blocks: Annotated[
        tuple[Annotated[tuple[Real, ...], Field(max_length=_MOST_BLOCKS)], ...], Field(max_length=_MOST_BLOCKS)
    ]
    ulps: Annotated[tuple[Count, ...], Field(max_length=_MOST_ULPS)] = ()
    worst: Annotated[tuple[WorstElement, ...], Field(max_length=_MOST_ELEMENTS)] = ()


@dataclass(frozen=True, slots=True)
class NodeError:
    """One operator of a graph, and how far its result is off in the compiled program.

    Errors are relative, in root mean square; they are infinite where NaN or infinity is on one side only.

    Attributes:
        inputs: The nodes among those listed that its inputs come from.
        error: How far the compiled program's value is from eager's, inherited errors included.
        own: How far it is from what eager makes of the compiled program's own inputs; None if that is not known.
        noise: How far eager's value is from eager's in float64; None if that is not known.
        source: The user's line, or "".
    """

    name: str
    op: str
    inputs: Annotated[tuple[str, ...], Field(max_length=MOST_NODES)]
    error: Real
    own: Real | None = None
    noise: Real | None = None
    source: str = ""


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
