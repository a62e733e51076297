"""A rank that is killed, and ranks that torch's elastic agent starts anew: they are checked on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.elastic_program import STEPS
from tests.support.ranks import LIMIT, start
from tests.support.started_programs import finished


def started(folder: Path) -> tuple[int, str]:
    """Run the program under the agent, with a watchdog; its exit code and what it and the ranks printed."""
    agent = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    process = start(folder, "output.txt", *agent, "-m", "tests.support.elastic_program", str(folder))
    try:
        code = process.wait(LIMIT)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        code = -1
    return code, (folder / "output.txt").read_text(errors="replace")


@pytest.mark.slow
@pytest.mark.ci_sample
def test_ranks_that_are_started_anew_are_checked_and_their_reports_are_merged(tmp_path: Path) -> None:
    code, output = started(tmp_path)
    assert code == 0, output[-6000:]
    assert "exitcode: -9" in output or "Signal 9" in output
    assert not list(tmp_path.glob("attempt0-*.json"))
    for rank in range(2):
        told = json.loads((tmp_path / f"attempt1-rank{rank}.json").read_text())
        assert ["logic", "sent[all_reduce_0]"] in told["findings"]
        assert told["checked"]["outputs"] == STEPS
        assert any(f"rank {1 - rank} on" in note for note in told["notes"])
    words = (sys.executable, "-m", "checked_backend", "report", tmp_path / "reports", "--merge")
    code, out, err = finished(words, tmp_path)
    assert code == 1, err
    assert "sent[all_reduce_0]" in out
