"""Sessions: what a room of the package remembers of one, and for how long."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from checked_backend.findings import RegionInfo, Skip
from checked_backend.report.session import Session, active_sessions, collect


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


@pytest.mark.parametrize(
    ("regions", "title"),
    [
        ((), "cb.collect()"),
        (("ConvNet [0/0]",), "ConvNet"),
        (("ConvNet [0/0]", "ConvNet [0/1]", "f [1/0]"), "ConvNet and f"),
        (("a [0/0]", "b [1/0]", "c [2/0]"), "a, b and c"),
        (("a [0/0]", "b [1/0]", "c [2/0]", "d [3/0]"), "a, b, c and 1 other"),
        (("a [0/0]", "b [1/0]", "c [2/0]", "d [3/0]", "e [4/0]"), "a, b, c and 2 others"),
    ],
)
def test_its_report_is_named_after_what_was_checked(regions: tuple[str, ...], title: str) -> None:
    with collect() as session:
        for name in regions:
            session.ledger.region(RegionInfo(name))
    assert session.report.title == title


def active_in_a_thread() -> tuple[Session, ...]:
    """The sessions that are active in a thread that is inside of none."""
    seen: list[tuple[Session, ...]] = []
    thread = threading.Thread(target=lambda: seen.append(active_sessions()))
    thread.start()
    thread.join()
    return seen[0]


def test_a_session_sees_the_threads_that_are_inside_of_none() -> None:
    with collect() as outer:
        with collect() as inner:
            assert active_in_a_thread() == (outer, inner)
        with collect(alone=True), collect(threads=False):
            assert active_in_a_thread() == (outer,)
    assert active_in_a_thread() == ()


def test_a_thread_inside_of_a_session_is_seen_by_that_alone() -> None:
    def work() -> None:
        with collect() as own:
            seen.append(active_sessions() == (own,))

    seen: list[bool] = []
    with collect():
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert seen == [True]


def test_tasks_of_one_thread_are_apart() -> None:
    async def collecting(began: asyncio.Event, seen: asyncio.Event) -> None:
        with collect():
            began.set()
            await seen.wait()

    async def both() -> tuple[Session, ...]:
        began, seen = asyncio.Event(), asyncio.Event()
        task = asyncio.create_task(collecting(began, seen))
        await began.wait()
        active = active_sessions()
        seen.set()
        await task
        return active

    assert asyncio.run(both()) == ()
