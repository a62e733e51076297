"""What a finding is about, as data: an output, a gradient, a parameter, at which step of a program.

Findings carry it as text, because a report is text: ``output[0]``, ``grad[layer.weight]``. Code that must know what it
is asks `Subject`, so that the spelling stands in one place.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

__all__ = ["NAMELESS", "Subject", "SubjectKind"]


class SubjectKind(Enum):
    """What something is, by the word in front of its brackets."""

    OUTPUT = "output"
    GRADIENT = "grad"
    INPUT = "input"
    MUTATED = "mutated"
    PARAMETER = "param"
    BUFFER = "buffer"
    ATTRIBUTE = "attribute"
    STATE = "state"
    NODE = "node"
    SAVED = "saved"
    SENT = "sent"
    OTHER = ""

    @property
    def is_changed_in_place(self) -> bool:
        """Whether it is something of the caller's that a program writes to."""
        return self in _CHANGED


NAMELESS = frozenset({"candidate", "exception", "gradients", "optimizer", "outputs", "results", "rng state"})
"""Subjects without a name in brackets, and ``optimizer``, which is compared as a part of a program's state."""

_CHANGED = frozenset({SubjectKind.MUTATED, SubjectKind.PARAMETER, SubjectKind.BUFFER, SubjectKind.ATTRIBUTE})
_WORDS = "|".join(kind.value for kind in SubjectKind if kind.value)
_STEP = re.compile(r"([0-9]+):")
_KIND = re.compile(rf"({_WORDS})(?=\[|$)")
_NAME = re.compile(r"\[(.*)\]", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Subject:
    """What a finding, or a tensor of a control run, is about.

    Attributes:
        text: What people read: ``grad[layer.weight]``.
        step: At which step of a program of several; None outside of such.
    """

    text: str
    step: int | None = None

    @classmethod
    def of(cls, key: str) -> Subject:
        """Read a subject, or a key that `key` made."""
        found = _STEP.match(key)
        return cls(key) if found is None else cls(key[found.end() :], int(found[1]))

    @property
    def key(self) -> str:
        """A name among the values of a control run, different at each step: ``3:output[0]``."""
        return self.text if self.step is None else f"{self.step}:{self.text}"

    @property
    def kind(self) -> SubjectKind:
        """What kind of thing it is."""
        found = _KIND.match(self.text)
        return SubjectKind.OTHER if found is None else SubjectKind(found[1])

    @property
    def name(self) -> str:
        """What stands in its brackets; the whole text where it has none."""
        found = _NAME.search(self.text)
        return self.text if found is None else found[1]

    @property
    def is_gradient(self) -> bool:
        """Whether it is a gradient."""
        return self.kind is SubjectKind.GRADIENT
