"""Write a repro: one script that shows a finding with nothing but torch, and run it before it is announced."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from checked_backend.record import Kind
from checked_backend.reduce.judge import judge_trial
from checked_backend.reduce.program import Program
from checked_backend.reduce.script import save_values, script_text
from checked_backend.regions.trial import Trial

__all__ = ["Repro", "write_repro"]


@dataclass(frozen=True, slots=True)
class Repro:
    """A script on disk.

    Attributes:
        path: The script.
        confirmed: Whether it showed the bug in a fresh process.
        output: What it printed there, or why it could not be run.
    """

    path: Path
    confirmed: bool
    output: str


def write_repro(
    trial: Trial, folder: Path, *, name: str, subject: str, kind: Kind, source: str | None = None, timeout: float = 120
) -> Repro:
    """Write a trial as a script, and run it from disk in a fresh process.

    The script exits 1 while the bug is there and 0 when it is gone.

    Args:
        trial: A small program that goes wrong.
        folder: Where the script goes; made if it is not there.
        name: What the script is about, for its name: ``repro_<name>.py``.
        subject: The wrong result.
        kind: The kind of its finding.
        source: The user's line that the bug was found in.
        timeout: Seconds for each run.

    Returns:
        The script, and whether it showed the bug.

    Raises:
        Untranslatable: The program cannot be written as a script.
        OSError: The folder cannot be written to.
    """
    program = Program.of(trial, subject)
    found = next(
        (item for item in judge_trial(trial, timeout) or () if (item.kind, item.subject) == (kind, subject)), None
    )
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"repro_{re.sub(r'[^A-Za-z0-9_]+', '_', name)}.py"
    values = path.with_suffix(".safetensors")
    save_values(program, values)
    output = ""
    for plain in (True, False):
        _write(path, script_text(program, kind, found, source, plain=plain, values=values))
        code, output = _run(path, timeout)
        if code == 1:
            return Repro(path, True, output)
    return Repro(path, False, output)


def _write(path: Path, text: str) -> None:
    half = path.with_name(f".{path.name}.{os.getpid()}")
    half.write_text(text, encoding="utf-8")
    half.replace(path)


def _run(path: Path, timeout: float) -> tuple[int | None, str]:
    environment = {**os.environ, "TORCHINDUCTOR_FX_GRAPH_CACHE": "0", "TORCHINDUCTOR_AUTOGRAD_CACHE": "0"}
    try:
        done = subprocess.run(
            [sys.executable, str(path)],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
            check=False,
            stdin=subprocess.DEVNULL,
            env=environment,
        )
    except (OSError, subprocess.SubprocessError) as error:
        return None, f"{type(error).__name__}: {error}"
    return done.returncode, (done.stdout + done.stderr).strip()
