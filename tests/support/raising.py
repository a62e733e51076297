"""Functions that raise, for what tests replace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def raising(error: BaseException | type[BaseException]) -> Callable[..., Any]:
    """A function, or a compiler, that raises whatever it is given."""

    def raises(*_given: Any, **_more: Any) -> Any:
        raise error

    return raises
