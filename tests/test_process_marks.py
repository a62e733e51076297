"""The mark ``process`` and its guard, in runs of pytest of their own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.pytest_runs import run

TESTS = """
import multiprocessing
import os
import subprocess

import pytest

def fork():
    if os.fork() == 0:
        os._exit(0)
    os.wait()

@pytest.fixture(scope="module")
def shared():
    fork()

@pytest.fixture
def at_its_end():
    yield
    fork()

def test_nothing(): pass
def test_harmless(): subprocess.run(["uname", "-p"])
def test_forks(): fork()
def test_starts(): subprocess.run(["true", "--loudly"])
def test_by_shell(): os.system("true")
def test_spawns():
    process = multiprocessing.get_context("spawn").Process(target=print)
    process.start()
    process.join()
def test_shared(shared): pass
def test_shares(shared): pass
def test_at_its_end(at_its_end): pass

@pytest.mark.process
def test_marked(): fork()

@pytest.mark.process
@pytest.mark.smoke
def test_chosen(): fork()

@pytest.mark.forks
def test_implied(): fork()

@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", range(5))
def test_many(case): pass

@pytest.mark.slow
def test_slow(): fork()
"""
INDUCTOR = """
import torch

def wave(x): return x.sin() + 1
def test_eager(): assert torch.compile(wave, backend="eager")(torch.ones(3)).sum() > 0
def test_inductor(): assert torch.compile(wave)(torch.ones(3)).sum() > 0
"""


@pytest.mark.process
@pytest.mark.smoke
def test_a_test_that_starts_something_has_the_mark(tmp_path: Path) -> None:
    outcomes, printed = run(tmp_path, TESTS)
    assert outcomes == {
        "PASSED": {"test_nothing", "test_harmless", "test_chosen", "test_at_its_end", "test_many"},
        "FAILED": {"test_forks", "test_starts", "test_by_shell", "test_spawns", "test_shared", "test_shares"},
        "ERROR": {"test_at_its_end"},
    }
    assert "this test forks, and is not marked `process`" in printed
    assert "this test starts `true --loudly`" in printed
    assert (
        "left out: 2 tests that start processes or compile with Inductor, 3 more cases (these, too: "
        'pytest -m "not slow"), 1 slow tests; everything' in printed
    )


@pytest.mark.process
@pytest.mark.parametrize(
    ("words", "ran"),
    [
        (
            ("-m", "not slow"),
            {"test_nothing", "test_harmless", "test_marked", "test_chosen", "test_implied", "test_many"},
        ),
        (("-m", "slow"), {"test_slow"}),
    ],
    ids=["all but slow", "slow"],
)
def test_a_choice_of_ones_own(tmp_path: Path, words: tuple[str, ...], ran: set[str]) -> None:
    outcomes, printed = run(tmp_path, TESTS, *words)
    assert outcomes["PASSED"] - {"test_at_its_end"} == ran
    assert "left out" not in printed


@pytest.mark.process
def test_workers_say_what_they_left_out(tmp_path: Path) -> None:
    _, printed = run(tmp_path, TESTS, "-p", "xdist.plugin", "-n", "2")
    assert printed.count("left out: 2 tests that") == 1


@pytest.mark.process
def test_inductor_is_seen(tmp_path: Path) -> None:
    outcomes, printed = run(tmp_path, INDUCTOR)
    assert outcomes == {"PASSED": {"test_eager"}, "FAILED": {"test_inductor"}}
    assert re.search("this test .*compiles with Inductor", printed)
