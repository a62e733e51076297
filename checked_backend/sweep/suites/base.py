"""The interface of a suite: it lists its models and builds one."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from checked_backend.report import Report
from checked_backend.runs.case import Case
from checked_backend.sweep.rules import Settings


class Unsupported(Exception):
    """Raised if a model cannot run in this way here, without a bug in the model or the compiler."""


def digest_of(paths: Iterable[Path], folder: Path) -> str:
    """A text that changes when files do, or their places in a folder."""
    digest = hashlib.sha256()
    for path in sorted(paths):
        digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Model:
    """One model of a suite.

    Attributes:
        canary: Whether the suite itself lists the model as unreliable.
        fixed: Whether the model fixes its mode and its dtype, so that they cannot be chosen.
    """

    name: str
    canary: bool = False
    fixed: bool = False


@dataclass(frozen=True, slots=True)
class Built:
    """A program that can be run.

    Attributes:
        ready: Whether it already has the mode, dtype and device of the case.
        check: A function that checks it instead of `checked_backend.check`; None for that one.
        shrunk: Whether the suite made the model smaller. If it does not run, the suite is the cause.
    """

    function: Callable[..., Any]
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    ready: bool = False
    check: Callable[[], Report] | None = None
    shrunk: bool = False


class Suite(Protocol):
    """A collection of models."""

    def models(self) -> Sequence[Model]:
        """All models, in a fixed order.

        Raises:
            SuiteError: The suite has no models, or they cannot be listed.
            ImportError: The library with the models is not installed.
        """

    def fingerprint(self) -> str:
        """A text that changes when the models do; empty if the versions of libraries suffice for that."""
        return ""

    def build(self, case: Case, settings: Settings) -> Built:
        """Make a model and its inputs; `Unsupported` is raised, or what the model's own code raises."""
