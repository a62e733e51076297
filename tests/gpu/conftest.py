"""The device of these tests, and the lines that `run.sh` prints."""

from __future__ import annotations

import os
import platform
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from checked_backend import backends

HERE = Path(__file__).parent
_OUTCOMES = ("passed", "failed", "error", "skipped", "xfailed", "xpassed")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            item.add_marker(pytest.mark.slow)  # the default run leaves them out
            item.add_marker(pytest.mark.filterwarnings("ignore"))  # torch's and transformers' own


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """What fails is told at once: a run that is cut off tells nothing at its end."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ and HERE.name in Path(report.nodeid).parts:
        crash = getattr(report.longrepr, "reprcrash", None)
        said = str(getattr(crash, "message", report.longrepr)).strip().splitlines() or [""]
        sys.__stdout__.write(f"\n{report.nodeid} ({report.when}): {said[0][:300]}\n")
        sys.__stdout__.flush()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """One line for each part, and a total."""
    if config.getoption("markexpr") != "gpu":
        return
    parts: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for outcome in _OUTCOMES:
        for report in terminalreporter.getreports(outcome):
            part = Path(report.nodeid.partition("::")[0]).stem.removeprefix("test_")
            for name in (part, "total"):
                parts[name][outcome] += 1
                parts[name]["seconds"] += getattr(report, "duration", 0.0)  # collecting has none
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else f"no GPU: {platform.machine()}"
    terminalreporter.write_sep("=", f"torch {torch.__version__}, CUDA {torch.version.cuda}, {where}")
    for part in sorted(parts, key=lambda name: (name == "total", name)):
        counts = parts[part]
        told = [f"{counts[name]:.0f} {name}" for name in _OUTCOMES if counts[name]]
        bad = counts["failed"] + counts["error"]
        verdict = "FAILED" if bad else "passed" if counts["passed"] else "not run"
        terminalreporter.write_line(f"{part:<14} {verdict:<8} {counts['seconds']:6.0f} s  {', '.join(told)}")


@pytest.fixture(scope="session", autouse=True)
def _backends() -> None:
    """Where the package is not installed torch knows its backends by no entry point."""
    for name in sorted({"numcheck", "debug_interpreter"} - set(torch._dynamo.list_backends())):
        torch._dynamo.register_backend(getattr(backends, name), name=name)


@pytest.fixture(autouse=True)
def _device_lives() -> Iterator[None]:
    """Where a test has lost the device, its worker ends (``-n 8``): the tests behind it get another process."""
    yield
    if not torch.cuda.is_initialized():
        return
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        if "PYTEST_XDIST_WORKER" in os.environ:
            os._exit(1)
        raise


@pytest.fixture
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def gpu() -> Iterator[str]:
    """A GPU; the test is skipped without one."""
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    yield "cuda"
    torch.cuda.synchronize()
