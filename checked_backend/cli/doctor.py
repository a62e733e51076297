"""Find out what can be checked on this machine, and what cannot."""

from __future__ import annotations

import os
import subprocess
import tempfile
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import Any

import torch

from checked_backend.errors import CheckedBackendError
from checked_backend.findings import Verdict
from checked_backend.process.worker import cannot_differentiate_in_worker, cannot_fork, run_in_worker
from checked_backend.program.hook import missing_files
from checked_backend.report.environment import compiler_command, environment, run_command

_OLDEST, _NEWEST = (2, 11), (2, 15)
_OURS = ("debug_interpreter", "graph_dumper", "nop", "numcheck")
_NEEDS: Mapping[str, str] = {"openxla": "torch_xla", "openxla_eval": "torch_xla", "tvm": "tvm"}
_TIMEOUT_S = 60
_WORKS = "works"

_PROGRAM = """
#include <cmath>
extern "C" double answer(double x) { return std::sqrt(x); }
"""


@dataclass(frozen=True, slots=True)
class Capability:
    """One thing that works here or does not; without one that is required, the package is of little use."""

    name: str
    usable: bool
    required: bool = field(default=False, kw_only=True)
    note: str


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The state of this machine."""

    environment: Mapping[str, str]
    backends: tuple[str, ...]
    capabilities: tuple[Capability, ...]

    @property
    def verdict(self) -> Verdict:
        """*Fail* if something required does not work, else *pass*."""
        broken = any(capability.required and not capability.usable for capability in self.capabilities)
        return Verdict.FAIL if broken else Verdict.PASS

    def to_dict(self) -> dict[str, Any]:
        """Return the diagnosis as JSON values."""
        return {
            "schema": "checked_backend.cli.doctor",
            "version": 1,
            "verdict": self.verdict.value,
            **asdict(self),
        }

    def __str__(self) -> str:
        lines = ["Versions", *(f"  {name:<16} {value}" for name, value in self.environment.items())]
        lines += [
            "",
            "Dynamo backends that numcheck can check",
            *textwrap.wrap(", ".join(self.backends), 100, initial_indent="  ", subsequent_indent="  "),
        ]
        lines += ["", "What can be checked here"]
        for capability in self.capabilities:
            state = "yes" if capability.usable else "NO" if capability.required else "no"
            lines.append(f"  {state:<4} {capability.name}: {capability.note}")
        return "\n".join(lines)


def diagnose() -> Diagnosis:
    """Look at this machine. Compiles a few lines of C++ in a temporary folder; changes nothing."""
    backends = tuple(sorted(torch.compiler.list_backends(exclude_tags=())))
    capabilities = (_torch_version(), _registered(backends), _cpp(), _gpu(), *_others())
    candidates = tuple(name for name in backends if name not in _OURS and _is_candidate(name))
    return Diagnosis(environment(), candidates, capabilities)


def _is_candidate(backend: str) -> bool:
    """Whether a backend compiles programs here. Some only test torch itself; some need a package that is missing."""
    if backend.endswith(("_TESTING_ONLY", "minifier_backend")):
        return False
    if backend == "cudagraphs":
        return torch.cuda.is_available()
    return backend not in _NEEDS or find_spec(_NEEDS[backend]) is not None


def _torch_version() -> Capability:
    version = str(torch.__version__)
    numbers = tuple(int(part) for part in version.split(".")[:2])
    supported = ".".join(map(str, _OLDEST)) + " to " + ".".join(map(str, _NEWEST))
    note = f"{version}; this package is made for {supported}"
    return Capability("torch version", _OLDEST <= numbers <= _NEWEST, note)


def _registered(backends: tuple[str, ...]) -> Capability:
    missing = [name for name in _OURS if name not in backends]
    note = f"{', '.join(missing)} not registered; install the package (pip install checked-backend)"
    return Capability("backends by name", not missing, note if missing else ", ".join(_OURS), required=True)


def _cpp() -> Capability:
    name, command = "Inductor on the CPU", compiler_command()
    if problem := _try_compiler(command):
        note = f"{command} {problem}; install one or set CXX. Candidates such as aot_eager can still be checked"
        return Capability(name, False, note, required=not torch.cuda.is_available())
    capability = os.environ.get("ATEN_CPU_CAPABILITY")
    if capability and "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
        note = (
            f"{command} compiles, but ATEN_CPU_CAPABILITY={capability} is set, which Inductor's caches do not tell "
            "apart, so that results are wrong; set TORCHINDUCTOR_CACHE_DIR to a folder for this setting alone"
        )
        return Capability(name, False, note)
    return Capability(name, True, f"{command} compiles", required=True)


def _try_compiler(command: str) -> str:
    """Compile a small library as Inductor would. Returns the error, or ""."""
    if which(command) is None:
        return "is not on the PATH"
    with tempfile.TemporaryDirectory(prefix="checked_backend_") as folder:
        source = Path(folder, "probe.cpp")
        source.write_text(_PROGRAM, encoding="ascii")
        flags = ["/LD"] if Path(command).stem.lower() == "cl" else ["-shared", "-fPIC", "-o", "probe.so"]
        try:
            done = run_command([command, *flags, source.name], _TIMEOUT_S, cwd=folder)
        except (OSError, subprocess.SubprocessError) as error:
            return f"does not run ({error})"
    if done.returncode == 0:
        return ""
    first = next((line for line in (done.stderr or done.stdout).splitlines() if line.strip()), "no message")
    return f"does not compile ({first})"


def _gpu() -> Capability:
    name = "Inductor on a CUDA or ROCm GPU"
    if not torch.cuda.is_available():
        return Capability(name, False, "this torch sees no GPU; GPU code cannot be checked here")
    if find_spec("triton") is None:
        return Capability(name, False, "there is a GPU, but triton is not installed")
    free, total = (size / 2**30 for size in torch.cuda.mem_get_info())
    note = f"{torch.cuda.get_device_name()}, {free:.1f} of {total:.1f} GiB free; a check needs room for both sides"
    return Capability(name, True, note)


def _others() -> Iterator[Capability]:
    """What is of use besides, and needed by nobody."""
    mps, dot, transformers = torch.backends.mps.is_available(), which("dot"), find_spec("transformers")
    note = "no float64 there, so high-precision references run on the CPU" if mps else "this torch sees none"
    yield Capability("Apple GPU", mps, note)
    yield _isolation()
    yield _pytest()
    note = "graph.svg is written with each dump" if dot else "dot is not on the PATH; dumps have graph.dot only"
    yield Capability("pictures of graphs", dot is not None, note)
    note = "installed" if transformers else "not installed (pip install 'checked-backend[hf]')"
    yield Capability("Hugging Face models", transformers is not None, note)
    note = "the hook is installed"
    if missing := missing_files():
        note = (
            "no hook is installed, so the variable does nothing, and nobody says so (checked-backend autostart "
            "--install); checked-backend run needs none"
        )
    yield Capability("CHECKED_BACKEND=1", not missing, note)
    note = (
        "writes the graphs of a program that names one of these backends; one that names none writes nothing, and "
        "nobody says so (checked-backend run --dump DIR writes those of any program)"
    )
    yield Capability("CHECKED_BACKEND_DUMP=DIR", True, note)


def _isolation() -> Capability:
    name = "a process of its own"
    why = cannot_fork()
    if why is not None:
        return Capability(name, False, f"{why}, so check(isolate=True) and localizing are not possible")
    try:
        answer = run_in_worker(_after_a_backward_pass, timeout=_TIMEOUT_S)
    except CheckedBackendError:
        answer = "the backward pass failed"
    if answer != _WORKS:
        note = "check(isolate=True), with gradients only before the first backward pass of the process"
        return Capability(name, True, note)
    return Capability(name, True, "check(isolate=True); localizing and reducing survive compiled code that dies")


def _after_a_backward_pass() -> str:
    with torch.enable_grad():
        torch.ones((), requires_grad=True).backward()
    return cannot_differentiate_in_worker() or _WORKS


def _pytest() -> Capability:
    name = "pytest --numcheck"
    if find_spec("pytest") is None:
        return Capability(name, False, "pytest is not installed")
    if not any(entry.value.partition(".")[0] == "checked_backend" for entry in entry_points(group="pytest11")):
        return Capability(name, False, "the plugin is not registered; install the package, or use -p")
    parallel = "also in parallel (xdist)" if find_spec("xdist") else "in one process; pytest-xdist is not installed"
    return Capability(name, True, parallel)
