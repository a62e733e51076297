"""A view of long work that changes in place on a terminal. Elsewhere there is none."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console, RenderableType
from rich.live import Live

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["LiveView"]


class LiveView:
    """Is shown while it is entered, and leaves nothing behind. Lines that are printed meanwhile appear above it.

    Args:
        console: Where to show it.
        show: Gives the view each time that it is drawn; None if it is only changed by `update`.
    """

    def __init__(self, console: Console, show: Callable[[], RenderableType] | None = None) -> None:
        self._live = Live(get_renderable=show, console=console, refresh_per_second=2, transient=True)

    def __enter__(self) -> Self:
        if self.is_shown:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.is_shown:
            self._live.stop()

    @property
    def is_shown(self) -> bool:
        """Whether there is a terminal."""
        return self._live.console.is_terminal

    def update(self, view: RenderableType) -> None:
        """Show something else from now on."""
        if self.is_shown:
            self._live.update(view)
