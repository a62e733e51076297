"""The subject of a finding as data: an output, a gradient or a parameter, and the step of a program.

Findings carry it as text, because a report is text: ``output[0]``, ``grad[layer.weight]``. Code that must know what it
is asks `Subject`, so that the spelling stands in one place.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum


class SubjectKind(Enum):
    """The kind of a subject, which is the word in front of its brackets."""

    OUTPUT = "output"
    GRADIENT = "grad"
    INPUT = "input"
    DRAWN = "drawn"
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
    """The subject of a finding, or of a tensor of a control run.

    Attributes:
        text: The text for people: ``grad[layer.weight]``.
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
        """The kind of the subject."""
        found = _KIND.match(self.text)
        return SubjectKind.OTHER if found is None else SubjectKind(found[1])

    @property
    def name(self) -> str:
        """The name in the brackets; the whole text if there are none."""
        found = _NAME.search(self.text)
        return self.text if found is None else found[1]

    @property
    def is_gradient(self) -> bool:
        """Whether it is a gradient."""
        return self.kind is SubjectKind.GRADIENT
