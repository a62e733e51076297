"""The text of a repro."""

from __future__ import annotations

import math
import platform
from pathlib import Path

import torch
from safetensors.torch import save_file

from checked_backend.record import Finding, Kind
from checked_backend.reduce.forms import form_of
from checked_backend.reduce.program import Program
from checked_backend.reduce.translate import program_lines

__all__ = ["script_text"]

_SCRIPT = '''\
"""{title}

{facts}
Exits 1 while the bug is there, 0 when it is gone.
"""

import torch


def make_inputs():
{inputs}


def program({parameters}):
{body}


with torch.no_grad():
    expected = program(*make_inputs())[{index}]
    actual = torch.compile(program, {compile})(*make_inputs())[{index}]
print("eager:   ", expected)
print("compiled:", actual)
difference = (actual.double() - expected.double()).abs().max().item()
print("greatest difference:", difference)
raise SystemExit(not difference <= {tolerance:g})  # rounding explains less than that
'''


def script_text(
    program: Program, kind: Kind, finding: Finding | None, source: str | None, *, plain: bool, values: Path
) -> str:
    """The text of a script that shows a finding.

    Args:
        program: The program.
        kind: The kind of finding.
        finding: It, with its numbers, if it is known.
        source: The user's line.
        plain: Prefer calls of ``torch`` to operators.
        values: The file of values that are too many to be written.

    Raises:
        Untranslatable: The program cannot be written.
    """
    names = list(program.placeholders())
    inputs = []
    for name, value in program.placeholders().items():
        text = form_of(value).text if isinstance(value, torch.Tensor) else repr(value)
        if text is None:
            text = f"saved[{name!r}]"
        inputs.append(f"    {name} = {text}")
    options = program.trial.options
    compiled = [f"backend={options.compiler!r}"]
    if options.compiler_options:
        compiled.append(f"options={options.compiler_options!r}")
    if program.trial.dynamic:
        compiled.append("dynamic=True")
    facts = f"torch {torch.__version__}, Python {platform.python_version()}, {platform.platform()}"
    return _SCRIPT.format(
        title=f"{kind}: {finding.message if finding else 'compiled differs from eager'}",
        facts=facts + (f"\nFound at {source}" if source else ""),
        inputs="\n".join([*_loading(inputs, values), *inputs, f"    return {', '.join(names)},"]),
        parameters=", ".join(names),
        body="\n".join(f"    {line}" for line in program_lines(program, plain=plain)),
        index=program.tracked or 0,
        compile=", ".join(compiled),
        tolerance=_tolerance(finding),
    )


def save_values(program: Program, path: Path) -> None:
    """Save the inputs that have too many values to be written in a script."""
    large = {
        name: value.contiguous()
        for name, value in program.placeholders().items()
        if isinstance(value, torch.Tensor) and form_of(value).text is None
    }
    if large:
        save_file(large, str(path))


def _loading(inputs: list[str], values: Path) -> list[str]:
    if not any("saved[" in line for line in inputs):
        return []
    return [
        "    from safetensors.torch import load_file  # pip install safetensors",
        "",
        f'    saved = load_file(__file__.rpartition("repro_")[0] + {values.name!r})',
    ]


def _tolerance(finding: Finding | None) -> float:
    """Between what rounding explains and what the bug does."""
    if finding is None or finding.metrics is None:
        return 0.0
    bug = finding.metrics.max_abs_diff
    noise = finding.noise.max if finding.noise else 0.0
    return 10.0 ** math.floor(math.log10(math.sqrt(noise * bug))) if noise and bug else 0.0
