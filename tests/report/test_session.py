"""Sessions: what a room of the package remembers of one, and for how long."""

from __future__ import annotations

from collections.abc import Iterator

from checked_backend.findings import Skip
from checked_backend.report.session import active_sessions, collect


class Remembered:
    """A part that says once what it could not see."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def close(self) -> Iterator[Skip]:
        yield Skip("what was seen", f"{self.seen}", matters=True)


def test_each_session_has_one_part_of_a_kind() -> None:
    with collect() as outer, collect() as inner:
        for session in active_sessions():
            session.part(Remembered).seen.append(1)
        assert outer.part(Remembered) is outer.part(Remembered) is not inner.part(Remembered)
        assert outer.part(Remembered).seen == inner.part(Remembered).seen == [1]


def test_what_a_part_could_not_see_is_in_the_coverage_when_its_session_ends() -> None:
    with collect() as session:
        session.part(Remembered).seen.append(2)
        assert not session.report.coverage.skipped
    assert session.report.coverage.skipped == (Skip("what was seen", "[2]", matters=True),)


def test_a_session_that_nobody_asked_for_a_part_ends_with_none() -> None:
    with collect() as session:
        pass
    assert not session.report.coverage.skipped
