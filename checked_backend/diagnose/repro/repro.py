"""Write a repro: one script that shows a finding with nothing but torch, and run it before it is announced."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from safetensors.torch import save

from checked_backend.autostart import ON
from checked_backend.diagnose.oracle import Oracle, verdict_oracle, warm_up
from checked_backend.diagnose.reduce.failing_case import FailingCase
from checked_backend.diagnose.reduce.passes.calls import in_float64
from checked_backend.diagnose.repro.compile_code import CompileCode, is_random, write_compile
from checked_backend.diagnose.repro.kernel_code import KernelCode
from checked_backend.diagnose.repro.script import (
    BUG_GONE,
    BUG_THERE,
    Script,
    is_drowned,
    write_script,
    write_source_script,
)
from checked_backend.findings import Finding, Kind
from checked_backend.process.job import die_with
from checked_backend.process.worker import cannot_fork
from checked_backend.regions.graph_case import GraphCase
from checked_backend.report.file_names import free_path
from checked_backend.report.write import write_whole
from checked_backend.scripts.values import Untranslatable

_NOT_SHOWN = "did not show when it was tried once more"


@dataclass(frozen=True, slots=True)
class Repro:
    """A script on disk.

    Attributes:
        confirmed: Whether it showed the bug in a fresh process.
        output: Its output there, or why it could not be run.
    """

    path: Path
    confirmed: bool
    output: str

    @property
    def doubt(self) -> str:
        """Why it cannot be relied on, in words; "" if it was confirmed."""
        last = (self.output.strip().splitlines() or ["nothing"])[-1]
        return "" if self.confirmed else f"the script does not show it in a fresh process; it said: {last}"


def write_repro(
    case: GraphCase,
    folder: Path,
    *,
    name: str,
    subject: str,
    kind: Kind,
    source: str | None = None,
    timeout: float = 120,
    oracle: Oracle = verdict_oracle,
) -> Repro:
    """Write a case as a script, and run it from disk in a fresh process.

    The script exits 1 while the bug is there and 0 when it is gone. It calls plain ``torch`` functions if they do the
    same and the bug shows with them, else operators.

    Args:
        name: The topic of the script, for its file name: ``repro_<name>.py``.

    Raises:
        Untranslatable: The program cannot be written as a script.
        OSError: The folder cannot be written to.
    """
    program = FailingCase.of(case, subject)
    warm_up(case)
    about = [f"Found at {source}"] if source else []

    def finding_of(case: GraphCase) -> Finding | None:
        found = oracle(case, timeout) or ()
        return next((item for item in found if (item.kind, item.subject) == (kind, subject)), None)

    finding = finding_of(program.case)
    if finding is not None and is_drowned(finding):
        wide = in_float64(program)
        there = finding_of(wide.case)
        if there is not None and not is_drowned(there):
            program, finding = wide, there
            about.append("In float64: in lower precision rounding differs as much.")
    compiled = write_compile(program, random=True if kind is Kind.RNG else None)
    shown = finding or Finding(kind, subject, _NOT_SHOWN)
    return _first_that_shows(script_path(folder, name), program, shown, compiled, about, timeout)


def write_kernel_repro(
    code: KernelCode, finding: Finding, folder: Path, *, name: str, source: str | None = None, timeout: float = 120
) -> Repro | None:
    """Write a kernel as a script that calls no compiler, and run it from disk in a fresh process.

    Returns:
        The script; None if it does not show the finding there, and then no file is left.

    Raises:
        Untranslatable: The operators that the kernel stands for cannot be written as a script.
        OSError: The folder cannot be written to.
    """
    path = script_path(folder, f"{name}-kernel")
    values = path.with_suffix(".safetensors")
    found = [f"Found at {source}"] if source else []
    about = [*found, "The kernel and what it reads are as they were in the program."]
    program = FailingCase(code.case, "output[0]")
    if is_random(program):  # the compiler may draw other numbers
        return None
    script = write_script(
        program, finding, CompileCode(""), plain=True, values_file=values.name, about=about, compiled=code.lines
    )
    repro = _write_and_run(path, script, timeout)
    if repro.confirmed:
        return repro
    for file in (path, values):
        file.unlink(missing_ok=True)
    return None


def _first_that_shows(
    path: Path, program: FailingCase, shown: Finding, compiled: CompileCode, about: Sequence[str], timeout: float
) -> Repro:
    """Write a script that calls plain ``torch`` functions. If it does not show the bug, write one with operators."""
    output, first = "", ""
    values = path.with_suffix(".safetensors")
    for plain in (True, False):
        script = write_script(program, shown, compiled, plain=plain, values_file=values.name, about=about)
        if script.text == first:
            break
        repro = _write_and_run(path, script, timeout)
        if repro.confirmed and shown.message == _NOT_SHOWN and shown.kind in (Kind.LOGIC, Kind.PRECISION):
            return Repro(path, False, f"{_NOT_SHOWN}: its noise is not known, and rounding alone may differ")
        if repro.confirmed:
            return repro
        output = repro.output
        if _took_too_long(output) or compiled.problem:
            break
        first = script.text
    return Repro(path, False, output)


def write_source_repro(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    folder: Path,
    *,
    name: str,
    title: str,
    source: str | None,
    dynamic: bool | None = None,
    timeout: float = 120,
) -> Repro:
    """Write a script as `write_source_script` does, and run it from disk in a fresh process.

    Raises:
        Untranslatable: The function needs something that a script cannot make.
        OSError: The folder cannot be written to.
    """
    if kwargs:
        raise Untranslatable("it is called with keyword arguments")
    path = script_path(folder, name)
    about = [f"Found at {source}"] if source else []
    file = path.with_suffix(".safetensors").name
    script = write_source_script(function, args, title=title, values_file=file, about=about, dynamic=dynamic)
    return _write_and_run(path, script, timeout)


def script_path(folder: Path, name: str) -> Path:
    """A free name for a script, in a folder that is made if it does not exist."""
    folder.mkdir(parents=True, exist_ok=True)
    return free_path(folder, "_".join(["repro", *re.findall("[A-Za-z0-9]+", name)]), ".py")


def _write_and_run(path: Path, script: Script, timeout: float) -> Repro:
    """Write a script, with the values that it reads, and run it from disk in a fresh process.

    Args:
        timeout: Seconds for each run. A script that gave no result is run again, unless it took too long.
    """
    if script.saved:
        write_whole(save(script.saved), path.with_suffix(".safetensors"))
    write_whole(script.text, path)
    confirmed, output = _run(path, timeout)
    if not confirmed and BUG_GONE not in output and not _took_too_long(output):
        # a busy machine may have failed to start the process
        confirmed, output = _run(path, timeout)
    return Repro(path, confirmed, output)


def _took_too_long(output: str) -> bool:
    return output.startswith(subprocess.TimeoutExpired.__name__)


def _run(path: Path, timeout: float) -> tuple[bool, str]:
    """Run the script without graph caches: code that another compiler made must not be taken for this one's."""
    environment = {**os.environ, "TORCHINDUCTOR_FX_GRAPH_CACHE": "0", "TORCHINDUCTOR_AUTOGRAD_CACHE": "0"}
    environment[ON] = "0"  # the script is no part of the user's program
    try:
        done = subprocess.run(
            [sys.executable, str(path.resolve())],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
            check=False,
            stdin=subprocess.DEVNULL,
            env=environment,
            preexec_fn=None if cannot_fork() else partial(die_with, os.getpid()),
        )
    except (OSError, subprocess.SubprocessError) as error:
        return False, f"{type(error).__name__}: {error}"
    confirmed = done.returncode == 1 and BUG_THERE in done.stdout
    return confirmed, (done.stdout + ("" if confirmed else done.stderr)).strip()
