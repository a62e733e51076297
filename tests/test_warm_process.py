"""A script in a fork of a warm Python ends, prints and finds its modules as in one that starts from nothing."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.warm_process import WarmPython

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="only Linux tells of the end of a process by a file"),
]

TELLS = """
import os, sys
import beside
import torch
print(sys.argv[1:], os.getcwd(), os.environ.get("TOLD"), sys.path, __name__, __file__ == sys.argv[0], sys.stdin.read())
print(sorted(set(sys.modules) & {"checked_backend", "tests", "pytest"}), file=sys.stderr)
"""
ENDS = {
    "ends": "",
    "exits": "raise SystemExit(3)",
    "exits with a text": "raise SystemExit('why')",
    "raises": "raise ValueError('why')",
    "is killed": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "ends at once": "import os; os._exit(5)",
    "is no Python": "1 +",
    "exits with zero": "raise SystemExit(0)",
    "exits with a large number": "raise SystemExit(-1)",
    "has a thread": "import threading, time; threading.Thread(target=lambda: (time.sleep(0.5), print('end'))).start()",
    "prints at its end": "import atexit; atexit.register(print, 'end')",
}


def fresh(script: Path, *words: str, **options: object) -> subprocess.CompletedProcess[str]:
    words = (sys.executable, str(script), *words)
    return subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, **options)


def test_it_finds_what_a_fresh_process_finds(warm_python: WarmPython, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "beside.py").write_text("")
    script = tmp_path / "script.py"
    script.write_text(TELLS)
    options = {"cwd": tmp_path / "elsewhere", "env": {**os.environ, "TOLD": "1"}}
    there, here = (run(script, "a", "b c", **options) for run in (fresh, warm_python.run))
    assert (here.returncode, here.stdout, here.stderr) == (there.returncode, there.stdout, there.stderr)
    assert here.stderr == "[]\n"


def test_no_two_draw_the_same(warm_python: WarmPython, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import random, torch; print(torch.rand(2).tolist()); print(random.random())")
    one, other = (warm_python.run(script).stdout.splitlines() for _ in range(2))
    assert not set(one) & set(other)


@pytest.mark.parametrize("source", ENDS.values(), ids=ENDS)
def test_it_ends_as_a_fresh_process_does(warm_python: WarmPython, tmp_path: Path, source: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(source)
    there, here = fresh(script), warm_python.run(script)
    assert (here.returncode, here.stdout) == (there.returncode, there.stdout)
    assert here.stderr.splitlines()[-1:] == there.stderr.splitlines()[-1:]


def test_one_that_takes_too_long_is_killed_with_what_it_started(warm_python: WarmPython, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, time\nos.fork()\nwhile True:\n    open('alive', 'a').write('.')\n    time.sleep(0.05)"
    )
    with pytest.raises(subprocess.TimeoutExpired):
        warm_python.run(script, cwd=tmp_path, timeout=3.0)
    time.sleep(1.0)
    size = (tmp_path / "alive").stat().st_size
    time.sleep(1.0)
    assert 0 < size == (tmp_path / "alive").stat().st_size


def test_what_torch_reads_while_it_is_imported_is_heeded(warm_python: WarmPython, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("from torch._inductor import config; print(config.fx_graph_cache)")
    assert warm_python.run(script).stdout == "True\n"
    assert warm_python.run(script, env={**os.environ, "TORCHINDUCTOR_FX_GRAPH_CACHE": "0"}).stdout == "False\n"
