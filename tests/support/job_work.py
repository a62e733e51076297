"""Work for the tests of processes. None of it loads torch, unless a job has threads."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from checked_backend.process.job import AnswerFolder


def work(question: Mapping[str, Any], answers: AnswerFolder) -> int:
    """Note a stage, answer, and then do what is asked. Returns an exit status."""
    answers.note("at work")
    if question.get("answer", True):
        answers.answer(str(os.getppid()))
    what = question["do"]
    if what == "hang":
        time.sleep(600)
    elif what == "abort":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        Path(question["pid_file"]).write_text(str(child.pid))
        os.abort()
    elif what == "leave":
        sys.exit(3)
    elif what == "eat":
        bytearray(1 << 32)
    elif what == "kill the parent" and os.getppid() != question["driver"]:
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(600)
    elif what == "print":
        print("out")
        print("err", file=sys.stderr)
        return 5
    return 0
