"""Differences of compiled programs that PyTorch documents. They are told, and are no failure.

A class takes only what its page describes. The same kind of finding in another direction, or about another subject, is
a failure like any other.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

from checked_backend.subjects import Subject, SubjectKind

__all__ = ["DOCUMENTED", "Difference", "documented"]

_NUMBER = re.compile(r"\d+")


class Found(Protocol):
    """A finding, or what is kept of it."""

    @property
    def detail(self) -> str:
        """Its finer kind."""

    @property
    def subject(self) -> str:
        """What it is about."""

    @property
    def expected(self) -> str | None:
        """What eager has, in words."""

    @property
    def actual(self) -> str | None:
        """What the compiled program has."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A class of documented differences.

    Attributes:
        reason: The difference, in a sentence.
        source: The page or thread that documents it.
        covers: Whether it describes a finding of this finer kind.
    """

    reason: str
    source: str
    covers: Callable[[Found], bool]


def _is_one_object_for_two_outputs(found: Found) -> bool:
    """Two outputs that are views of the same elements came back as one object.

    Eager's one object as two is no such thing, nor is an input that is returned in the place of a view of it: AOT
    autograd says which outputs are inputs, and makes them so.
    """
    expected, actual = found.expected or "", found.actual or ""
    other = actual.removeprefix("the same object: ")
    both = all(Subject(subject).kind is SubjectKind.OUTPUT for subject in (found.subject, other))
    return both and other != actual and expected == f"shared memory: {other}"


def _is_another_layout_of_a_result(found: Found) -> bool:
    """A result has other strides. What the caller's own tensors have is for nobody to choose.

    A stride of 0 that eager has not is no layout, but elements that share memory: they cannot be written to.
    """
    if Subject(found.subject).kind not in (SubjectKind.OUTPUT, SubjectKind.GRADIENT):
        return False
    expected, actual = (_NUMBER.findall(text or "") for text in (found.expected, found.actual))
    return bool(actual) and len(expected) == len(actual) and ("0" not in actual or "0" in expected)


DOCUMENTED: Mapping[str, Difference] = MappingProxyType(
    {
        "alias.identity": Difference(
            "a compiler may return one tensor object for two views of the same elements",
            "https://github.com/pytorch/pytorch/issues/191449",
            _is_one_object_for_two_outputs,
        ),
        "structure.stride": Difference(
            "a compiler may choose other strides for results; the values are eager's",
            "https://discuss.pytorch.org/t/is-it-normal-for-compiled-model-outputs-to-have-different-tensor-strides/223469",
            _is_another_layout_of_a_result,
        ),
    }
)
"""The classes, by the finer kind of finding.

Zeros where eager leaves no gradient are none of them: the check takes both for the same, so what it tells of a gradient
that only one side has is about numbers that are not zero.
"""


def documented(found: Found) -> Difference | None:
    """The documented difference that a finding is; None if it may be a bug.

    Args:
        found: The finding, or what is kept of it.
    """
    known = DOCUMENTED.get(found.detail)
    return known if known is not None and known.covers(found) else None
