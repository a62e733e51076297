"""The versions and the hardware that a check ran on: a report means little without them."""

from __future__ import annotations

import os
import platform
import socket
import subprocess
import sys
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from checked_backend.findings import EvidenceKey

_PACKAGES = ("triton", "transformers", "numpy")
_TIMEOUT_S = 10


def environment() -> dict[str, str]:
    """Return the facts that decide what a compiler does. Nothing here raises: what is unknown is left out.

    Asking for the C++ compiler's version starts a process, and asking for the GPU's name starts CUDA only where CUDA
    is available.

    Returns:
        ``python``, ``torch``, ``checked_backend``, ``platform``, ``cpu``, ``compiler``, ``threads``, and where there
        are any ``cuda``, ``gpu`` and the versions of packages that change results.
    """
    facts = {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "checked_backend": _version("checked-backend"),
        "platform": platform.platform(),
        "cpu": _cpu(),
        "threads": str(torch.get_num_threads()),
        "compiler": _compiler(),
        "cuda": str(torch.version.cuda or ""),
        "gpu": _gpu(),
        **{name: _version(name) for name in _PACKAGES},
    }
    return {name: value for name, value in facts.items() if value}


def here_and_now(devices: Iterable[str] = ()) -> dict[str, str]:
    """Return host, device and time, for a finding that the hardware of these devices may have caused."""
    used = sorted(set(devices)) or ["cpu"]
    names = {one: _gpu(one) if one.startswith("cuda") else _cpu() if one == "cpu" else one for one in used}
    return {
        EvidenceKey.HOST: socket.gethostname(),
        EvidenceKey.DEVICE: ", ".join(f"{device}: {name}" for device, name in names.items()),
        EvidenceKey.TIME: datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def compiler_command() -> str:
    """Return the C++ compiler that Inductor starts by default: ``$CXX``, else the platform's."""
    return os.environ.get("CXX") or {"darwin": "clang++", "win32": "cl"}.get(sys.platform, "g++")


def run_command(command: Sequence[str], seconds: float, **more: Any) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, whatever its exit status, and keep what it prints. More as `subprocess.run` takes it.

    Raises:
        OSError, ValueError, subprocess.SubprocessError: It cannot be run, or takes longer.
    """
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=seconds,
        check=False,
        stdin=subprocess.DEVNULL,
        **more,
    )


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _cpu() -> str:
    capability = str(torch.backends.cpu.get_cpu_capability())
    name = platform.processor() or platform.machine()
    try:
        listed = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        listed = []
    for line in listed:
        if line.startswith("model name"):
            name = line.partition(":")[2].strip()
            break
    return f"{name} ({capability})"


def _compiler() -> str:
    command = compiler_command()
    try:
        answer = run_command([command, "--version"], _TIMEOUT_S)
    except (OSError, ValueError, subprocess.SubprocessError):
        return f"{command}: not found"
    return next((line for line in answer.stdout.splitlines() if line.strip()), command)


def _gpu(device: str | None = None) -> str:
    if not torch.cuda.is_available():
        return ""
    try:
        return str(torch.cuda.get_device_name(device))
    except Exception as error:  # a GPU that is listed but does not start must not cost the report
        return f"not usable: {type(error).__name__}"
