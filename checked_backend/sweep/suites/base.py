"""What every suite can say: which models it has, and how one is made."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from checked_backend.report import Report
from checked_backend.sweep.case import Case, Settings

__all__ = ["Built", "Model", "Suite", "Unsupported"]


class Unsupported(Exception):
    """The model cannot be run in this way here, and that is nobody's fault."""


@dataclass(frozen=True, slots=True)
class Model:
    """One model of a suite.

    Attributes:
        name: In the suite.
        canary: Whether the suite itself does not count on it.
        fixed: Whether how it runs is part of it, so that it has no mode and no dtype to choose.
    """

    name: str
    canary: bool = False
    fixed: bool = False


@dataclass(frozen=True, slots=True)
class Built:
    """A program that is ready to be run.

    Attributes:
        function: A module or a function.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        ready: Whether mode, dtype and device are as asked for already.
        check: Checks it, if `checked_backend.check` is not how.
        shrunk: Whether the suite made it smaller than its authors had it: that it does not run is the suite's doing.
    """

    function: Callable[..., Any]
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    ready: bool = False
    check: Callable[[], Report] | None = None
    shrunk: bool = False


class Suite(Protocol):
    """Many models."""

    def models(self) -> Sequence[Model]:
        """All, in a fixed order.

        Raises:
            SuiteError: There are none, or they cannot be listed.
            ImportError: The library that has them is not here.
        """

    def fingerprint(self) -> str:
        """A text that changes when the models do; empty where the versions of libraries say that."""

    def build(self, case: Case, settings: Settings) -> Built:
        """Make a model and its inputs.

        Args:
            case: Which, and how it will be run.
            settings: Its batch size.

        Raises:
            Unsupported: It cannot be run in this way here.
            Exception: Whatever the model's own code raises.
        """
