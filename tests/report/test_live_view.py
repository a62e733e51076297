"""A view that changes in place on a terminal."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from checked_backend.report.live_view import LiveView


def console(*, terminal: bool) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, color_system=None, width=60)


def text_of(shown: Console) -> str:
    assert isinstance(shown.file, io.StringIO)
    return shown.file.getvalue()


def test_nothing_is_shown_where_there_is_no_terminal() -> None:
    shown = console(terminal=False)
    with LiveView(shown, lambda: "the view") as view:
        view.update("another view")
        assert not view.is_shown
    assert text_of(shown) == ""


def test_the_view_is_drawn_on_a_terminal_and_gone_after_an_error() -> None:
    shown = console(terminal=True)
    with pytest.raises(ZeroDivisionError), LiveView(shown, lambda: "the view"):
        raise ZeroDivisionError
    assert "the view" in text_of(shown)
    assert "\x1b[2K" in text_of(shown).rpartition("the view")[2]  # the line is erased
    with console(terminal=True) as other, LiveView(other) as view:
        view.update("another view")
    assert "another view" in text_of(other)
