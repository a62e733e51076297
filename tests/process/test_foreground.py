"""Programs that run with this one's terminal and files."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

_RUNS = """
import os, sys
from checked_backend.process.foreground import run_in_foreground
words = [sys.executable, "-c", "import sys; print(open(sys.argv[1]).read())", sys.argv[1]]
sys.exit(run_in_foreground(words, dict(os.environ)))
"""


@pytest.mark.process
def test_a_program_has_the_open_files_that_a_shell_hands_to_this_one() -> None:
    """``run p.py <(command)`` in a shell names such a file."""
    ours, theirs = os.pipe()
    os.write(theirs, b"data")
    os.close(theirs)
    try:
        words = [sys.executable, "-c", _RUNS, f"/dev/fd/{ours}"]
        ended = subprocess.run(words, pass_fds=(ours,), capture_output=True, text=True, timeout=60)
    finally:
        os.close(ours)
    assert (ended.returncode, ended.stdout) == (0, "data\n"), ended.stderr
