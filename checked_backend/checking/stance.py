"""The settings of Dynamo and of warnings under which a check runs a program."""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager
from typing import Any

import torch

__all__ = ["NEED_DYNAMO", "eager_stance", "no_warning_is_an_error"]

NEED_DYNAMO = frozenset({"associative_scan", "cond", "flex_attention", "scan", "while_loop"})
"""The names of torch's functions that need Dynamo, also in eager, to trace their bodies."""


def eager_stance(*, untraced: bool) -> AbstractContextManager[Any]:
    """Keep the program's own `torch.compile` calls from compiling in eager: a fault there would be on both sides.

    Args:
        untraced: Dynamo traces nothing at all, as under modes. Otherwise it also traces what the program compiles.
    """
    stance: AbstractContextManager[Any] = (
        torch.compiler.set_stance("force_eager")
        if untraced
        else torch.compiler.set_stance("default", force_backend="eager")
    )
    return stance


def no_warning_is_an_error() -> None:
    """Show warnings that filters turn into errors: when torch compiles, it gives other warnings, at other times."""
    shown: list[Any] = [("default", *entry[1:]) if entry[0] == "error" else entry for entry in warnings.filters]
    vars(warnings)["filters"][:] = shown
    warnings.simplefilter("default", append=True)  # so that it is noticed
