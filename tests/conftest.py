"""What every test starts from, and leaves behind."""

from __future__ import annotations

import faulthandler
import gc
import getpass
import os
import random
import signal
import subprocess
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from checked_backend.process.worker import cannot_differentiate_in_worker, cannot_fork
from checked_backend.regions.process_state import ProcessState
from tests.support.cli_tools import Run, runner
from tests.support.warm_process import WarmPython

pytest_plugins = ["tests.support.process_marks", "tests.durations"]

ENV_PREFIX = "CHECKED_BACKEND_"

# Inductor's caches do not tell processor settings apart: what they hold is wrong under another one.
if os.environ.get("ATEN_CPU_CAPABILITY"):
    _FOLDER = f"checked_backend_inductor_{getpass.getuser()}_{os.environ['ATEN_CPU_CAPABILITY']}"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(tempfile.gettempdir(), _FOLDER)))

# pytest has each thread's stack printed where a process dies. In a forked one a test means it to.
os.register_at_fork(after_in_child=faulthandler.disable)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Python's garbage collector looks for none while tests are imported, nor later among what is there by then.

    That took a third of the time of collecting tests.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.fixture
def one_rank() -> Iterator[None]:
    """This process is a group of ranks by itself."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Tests share few cores, and one thread makes sums the same on every machine."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def ctrl_c() -> Iterator[None]:
    """Ctrl-C interrupts, also where the tests are a shell's background job, which is started with it ignored."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True)
def clean_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No compiled region, seed, option or setting of one test reaches another; reports go to the test's own folder."""
    for variable in [name for name in os.environ if name.startswith(ENV_PREFIX)]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv(f"{ENV_PREFIX}REPORT_DIR", str(tmp_path / "reports"))
    torch._dynamo.reset()
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    before = ProcessState.capture()
    yield
    torch._dynamo.reset()
    # `set_float32_matmul_precision` leaves another state where it sets the value that was there.
    before.restore()


@pytest.fixture(autouse=True)
def can_fork(request: pytest.FixtureRequest) -> None:
    """A test that is marked ``forks`` is skipped where no forked process can do its work."""
    if request.node.get_closest_marker("forks") is not None:
        why = cannot_fork() or cannot_differentiate_in_worker()
        if why:
            pytest.skip(why)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs ``checked-backend`` in this process."""
    return runner(capsys)


@pytest.fixture(scope="session")
def warm_python() -> Iterator[WarmPython]:
    """Runs scripts that need torch alone."""
    warm = WarmPython()
    yield warm
    warm.close()


@pytest.fixture
def warm_repros(warm_python: WarmPython, monkeypatch: pytest.MonkeyPatch) -> None:
    """A repro is tried in a fork of a warm Python. One that the test runs itself starts from nothing, as usual."""
    if not hasattr(os, "pidfd_open"):
        return
    starts = subprocess.run
    caches_off = dict.fromkeys(("TORCHINDUCTOR_FX_GRAPH_CACHE", "TORCHINDUCTOR_AUTOGRAD_CACHE"), "0")
    warm_python.start({**os.environ, **caches_off})  # here, and not in a worker that ends with the test

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        if subprocess.run is not starts:  # the test has put another there
            return subprocess.run(command, **options)
        return warm_python.run(command[1], env=options["env"], timeout=options["timeout"])

    monkeypatch.setattr(
        "checked_backend.diagnose.repro.repro.subprocess", SimpleNamespace(**{**vars(subprocess), "run": run})
    )
