"""What long work says while it runs, and what a clean run says at its end."""

from __future__ import annotations

import io
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from checked_backend.findings import Coverage, Finding, Kind, RegionInfo, Skip
from checked_backend.options import CheckOptions
from checked_backend.report import progress as module
from checked_backend.report.ledger import Ledger
from checked_backend.report.progress import Progress
from checked_backend.report.reporter import Reporter
from checked_backend.report.session import ProcessEnd, closing_line, collect, say_closing_line
from tests.support.report_tools import Terminal


def test_a_pipe_gets_few_plain_lines() -> None:
    stream, times = io.StringIO(), iter([0.0, 1.0, 2.0, 7.0, 8.0])
    progress = Progress(stream, lambda: next(times))
    for text in ("one", "two", "three\nand more", "four"):
        progress(text)
    progress.end()
    assert stream.getvalue() == (
        "numcheck:    1 s: one (Ctrl-C keeps what is known)\nnumcheck:    7 s: three (Ctrl-C keeps what is known)\n"
    )


@pytest.mark.parametrize("terminal", [True, False])
def test_what_has_no_news_is_told_as_time_goes_on_and_no_longer_than_it_takes(
    terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_TICK", 0.001)
    stream, now, threads = Terminal() if terminal else io.StringIO(), [0.0], threading.active_count()

    def told(words: str) -> bool:
        return any(words in stream.getvalue() or time.sleep(0.01) for _ in range(300))

    progress = Progress(stream, lambda: now[0], on_interrupt="", limit=300, patient=True)
    with progress.doing("running"):
        now[0] = 2.0
        assert not stream.getvalue()
        now[0] = 20.0
        assert told("numcheck:   20 s of at most 300 s: running")
        with progress.doing("compiling"):
            now[0] = 41.0
            assert told("41 s of at most 300 s: compiling")
        now[0] = 63.0
        assert told("63 s of at most 300 s: running")
        assert threading.active_count() == threads  # what counts a program's threads does not see it
    now[0] = 90.0
    text = stream.getvalue()
    time.sleep(0.05)
    assert stream.getvalue() == text
    progress.begin()
    with progress.doing("another check"):
        now[0] = 110.0
        assert told("20 s of at most 300 s: another check")


def test_no_thread_is_started_for_what_was_quick_before(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[object] = []
    monkeypatch.setattr("_thread.start_new_thread", lambda *_given: started.append(None))
    progress = Progress(io.StringIO(), patient=True)
    for _ in range(9):
        with progress.doing("running"):
            pass
    assert len(started) == 1


def test_a_terminal_has_one_line_that_is_wiped_at_the_end() -> None:
    stream = Terminal()
    progress = Progress(stream)
    progress("one")
    progress("two \x1b[2J" + "long " * 100)
    progress.end()
    text = stream.getvalue()
    assert "\n" not in text
    assert "\x1b" not in text
    assert text.endswith("\r")
    assert max(len(part) for part in text.split("\r")) <= 110


@pytest.mark.parametrize("columns", [0, 20, 40, 60, 80, 200])
def test_a_line_fits_the_terminal_and_says_what_is_done_before_what_ctrl_c_does(
    columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = Terminal()
    monkeypatch.setattr(stream, "fileno", lambda: 2)
    monkeypatch.setattr("os.get_terminal_size", lambda _number: os.terminal_size((columns, 25)))
    Progress(stream)("long " * 100)
    text = stream.getvalue().removeprefix("\r")
    assert len(text) == (min(110, columns - 1) if columns else 79)
    assert text.startswith("numcheck:    0 s")
    assert ("long" in text) is (columns != 20)
    remark = " (Ctrl-C keeps what is known)" if columns in (0, 80, 200) else ""
    assert text.rstrip().endswith(f"...{remark}")


def test_the_line_of_a_forked_process_is_wiped_too() -> None:
    stream = Terminal()
    Progress(stream).end()  # this process has written nothing
    assert stream.getvalue() == f"\r{'':<110}\r"


def test_a_stream_that_is_closed_disturbs_nothing() -> None:
    stream = io.StringIO()
    progress = Progress(stream)
    stream.close()
    progress("one")
    progress.end()


CLEAN = Coverage(
    regions=(RegionInfo("Net [0/0]", calls=9, checked_calls=9), RegionInfo("f [1/0]", calls=9, checked_calls=9)),
    checked={"tensors": 189},
    detection_limit={"output[0]": 1e-9, "grad[w]": 2e-4},
)


def test_the_closing_line() -> None:
    assert closing_line(CLEAN) == (
        "numcheck: 2 regions, 18 calls, 189 tensors agree with eager (smallest relative error that would have been "
        "caught everywhere: 0.0002)"
    )


def test_the_closing_line_counts_tensors_that_are_no_larger_than_their_noise() -> None:
    rounding = {"grad[k.bias]": 213.0, "grad[v.bias]": 1.0}
    told = closing_line(replace(CLEAN, detection_limit={**CLEAN.detection_limit, **rounding}))
    assert told.endswith("caught everywhere but in 2 tensors no larger than the noise: 0.0002)")
    assert closing_line(replace(CLEAN, detection_limit=rounding)).endswith("caught everywhere: 2.1e+02)")


def test_the_closing_line_does_not_pass_over_what_is_ignored() -> None:
    ignored = replace(CLEAN, ignored=(Finding(Kind.LOGIC, "output[0]", "wrong"),))
    assert "189 tensors agree with eager, but for 1 finding that is ignored (smallest" in closing_line(ignored)


def test_what_is_equal_in_every_bit_is_said_to_agree_exactly() -> None:
    assert closing_line(replace(CLEAN, detection_limit={})).endswith("189 tensors agree with eager exactly")


@pytest.mark.parametrize("what", ["nothing else", "a finding", "something missed", "nothing checked"])
def test_it_is_said_to_the_logger_of_a_clean_run_and_of_no_other(what: str, caplog: pytest.LogCaptureFixture) -> None:
    ledger = Ledger()
    ledger.add_coverage(Coverage() if what == "nothing checked" else CLEAN)
    if what == "a finding":
        ledger.add_findings([Finding(Kind.LOGIC, "output[0]", "wrong")])
    if what == "something missed":
        ledger.skip(Skip("gradients", "not run", matters=True))
    with caplog.at_level(logging.INFO, "checked_backend"):
        say_closing_line(ledger)
    assert ("agree with eager" in caplog.text) == ("agree" in caplog.text) == (what == "nothing else")
    assert ("nothing was checked: gradients: not run" in caplog.text) is (what == "something missed")


def test_what_is_checked_outside_of_sessions_is_told_at_the_end_of_the_process(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    registered: list[Callable[[], object]] = []
    monkeypatch.setattr("atexit.register", registered.append)
    end = ProcessEnd()
    (ledger,) = end.ledgers()
    assert end.ledgers() == (ledger,)
    ledger.add_coverage(CLEAN)
    (at_exit,) = registered
    with caplog.at_level(logging.INFO, "checked_backend"):
        monkeypatch.setattr("os.getpid", lambda: -1)  # a forked process is a part of the run
        assert end.ledgers() == ()
        at_exit()
        assert not caplog.text
        monkeypatch.undo()
        at_exit()
    assert "18 calls, 189 tensors agree with eager" in caplog.text


@pytest.mark.parametrize("closing", [True, False])
def test_a_region_outside_of_sessions_writes_to_the_end_of_the_process(
    closing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = ProcessEnd()
    monkeypatch.setattr("checked_backend.report.reporter.PROCESS_END", end)
    monkeypatch.setattr("atexit.register", lambda _: None)
    reporter = Reporter(RegionInfo("f [0/0]"), CheckOptions(closing=closing))
    reporter.count({"tensors": 2})
    with collect():
        reporter.count({"tensors": 3})
    assert sum(ledger.coverage().checked.get("tensors", 0) for ledger in end.ledgers()) == (2 if closing else 0)


@pytest.mark.parametrize("closing", [True, False])
def test_the_option_turns_off_the_line_of_a_session_too(closing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr("sys.stderr", stream)
    with collect() as session:
        Reporter(RegionInfo("f [0/0]"), CheckOptions(closing=closing)).count({"tensors": 2})
        session.ledger.add_coverage(CLEAN)
    assert ("agree with eager" in stream.getvalue()) is closing


@pytest.mark.parametrize("closing", [True, False])
@pytest.mark.parametrize("stream", [Terminal, io.StringIO, None])
def test_it_is_printed_where_no_logger_has_it_unless_that_was_not_asked_for(
    stream: type[io.StringIO] | None, closing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stderr = None if stream is None else stream()
    monkeypatch.setattr("sys.stderr", stderr)
    with collect(closing=closing) as session:
        session.ledger.add_coverage(CLEAN)
    assert stderr is None or ("agree with eager" in stderr.getvalue()) is closing


def test_a_part_that_tells_by_itself_finds_an_empty_line(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Terminal()
    monkeypatch.setattr(module, "_PATIENCE", 0.0)
    monkeypatch.setattr("sys.stderr", stream)
    with module.telling_whole("checking Net"):
        with module.nothing_told():
            assert stream.getvalue().endswith(" \r")
            stream.write("the part's own")
        assert stream.getvalue().endswith("the part's own")
    assert module.current_progress() is None
