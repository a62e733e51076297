"""Print a program as a torch function, and as a script that needs torch alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from checked_backend.fuzz.build import function_source, make_inputs, strides_of
from checked_backend.fuzz.generate.defined import draws, on_other_values
from checked_backend.fuzz.program import FuzzProgram
from checked_backend.report.clean import in_docstring
from checked_backend.scripts.comparisons import calls_differ, source_of
from checked_backend.scripts.values import TensorWriter, literal

DIFFERS = "eager and compiled differ"
"""The last line that a script of torch alone prints where the bug is."""

PLANTED = "planted"
"""The word in front of the name of a planted fault, with a colon between them."""

_FEW_VALUES = 64


def describe_inputs(program: FuzzProgram) -> list[str]:
    """A line for each input: ``x0: float32[2, 3], strides (1, 2), shares memory with x1``."""
    lines = []
    for place, given in enumerate(program.inputs):
        line = f"x{place}: {given.dtype}{list(given.shape)}"
        if given.stride != strides_of(given.shape) or given.offset:
            line += f", strides {given.stride}" + (f", offset {given.offset}" if given.offset else "")
        if given.shares is not None:
            line += f", shares memory with x{given.shares}"
        if given.fill == "edges":
            line += ", edge values"
        lines.append(line + (", requires grad" if given.requires_grad else ""))
    return lines


def describe(program: FuzzProgram) -> str:
    """A program for people: its inputs as comments, and its function."""
    return "\n".join([*(f"# {line}" for line in describe_inputs(program)), function_source(program)])


def render_script(
    program: FuzzProgram, compiler: str = "inductor", about: Sequence[str] = (), *, again: bool = False
) -> str:
    """A program as a script that compares eager and compiled. It needs torch alone.

    Args:
        again: Whether to call it again, on other values and on the first ones, before the results are compared.
    """
    how = ", dynamic=True" if program.dynamic else ""
    if compiler == "inductor" and any(draws(call.op) for call in program.calls):
        how += ', options={"fallback_random": True}'  # else its random numbers are others than eager's
    imports, backend = _backend(compiler)
    inputs = "inputs, other_inputs" if again else "inputs"
    comparison = [
        *source_of(calls_differ)[2:],
        f"\n\ncompiled = torch.compile(program, backend={backend}{how})",
        f"wrong = calls_differ(program, compiled, {program.gradients}, {inputs})",
        f'print("{DIFFERS}" if wrong else "eager and compiled agree")',
        "raise SystemExit(1 if wrong else 0)\n",
    ]
    return _script(program, about, (*_NEEDED, *imports), comparison, again=again)


def render_check(
    program: FuzzProgram,
    compiler: str,
    options: Mapping[str, Any],
    about: Sequence[str] = (),
    *,
    again: bool = False,
) -> str:
    """A program as a script that checks it: for what a plain comparison does not show, as the sign of a zero.

    Its inputs are written with all their values. It may call the program again, as fuzz does.
    """
    imports, backend = _backend(compiler)
    given = {
        "compiler": backend,
        "compiler_options": repr(dict(options)),
        "gradients": repr(program.gradients),
        "dynamic": repr(program.dynamic or None),
        "localize": "False",
        **({"effort": "Effort(further=[other_inputs()], refilled=[other_inputs()])"} if again else {}),
    }
    arguments = "".join(f"    {name}={value},\n" for name, value in given.items())
    check = f"report = checked_backend.check(\n    program,\n    inputs(),\n{arguments})\nprint(report)"
    needed = ("import checked_backend", *(["from checked_backend.checking.check import Effort"] if again else []))
    comparison = [check, 'raise SystemExit(1 if report.verdict == "fail" else 0)', ""]
    return _script(program, [*about, _NEEDS], (*needed, *imports), comparison, exact=True, again=again)


def _backend(compiler: str) -> tuple[Sequence[str], str]:
    """The lines that a script needs for a candidate, and its expression."""
    path, colon, name = compiler.rpartition(":")
    if not colon:
        return (), repr(compiler)
    if path == PLANTED:
        return ("from checked_backend.fuzz.planted import FAULTS",), f"FAULTS[{name!r}].compiler"
    folder = str(Path(path).parent)
    imports = ("import sys", "from runpy import run_path", f"\nsys.path.insert(0, {folder!r})")
    return imports, f"run_path({path!r})[{name!r}]"


def _script(
    program: FuzzProgram,
    about: Sequence[str],
    imports: Sequence[str],
    comparison: Sequence[str],
    *,
    exact: bool = False,
    again: bool,
) -> str:
    text = "\n".join(in_docstring(line) for text in about for line in text.splitlines())
    lines = [f'"""{text}"""\n', "import torch", "import torch.nn.functional as F", *imports, "\n"]
    lines += [function_source(program), "\n", *_inputs(program, "inputs", exact=exact)]
    if again:
        lines += _inputs(on_other_values(program), "other_inputs", exact=exact, seed=1)
    return "\n".join([*lines, *comparison])


def _inputs(program: FuzzProgram, name: str, *, exact: bool = False, seed: int = 0) -> Sequence[str]:
    """The lines of a function that makes a program's inputs; values of large ones are those of a seed."""
    made = make_inputs(program.inputs)
    writer = TensorWriter(made, offsets=True, long=literal if exact else partial(_few_or_random, seed=seed))
    values = [writer.write(one, "it") + (".requires_grad_()" if one.requires_grad else "") for one in made]
    lines = [*writer.lines, *(f"x{place} = {value}" for place, value in enumerate(values))]
    returned = ", ".join(f"x{place}" for place in range(len(made)))
    return [f"def {name}():", *(f"    {line}" for line in lines), f"    return [{returned}]", "\n"]


_NEEDS = "This needs the package checked_backend; a plain comparison does not show it."

_NEEDED = ("import traceback", "from torch.utils._python_dispatch import TorchDispatchMode")


def _few_or_random(values: torch.Tensor, seed: int) -> str:
    """The values of a tensor, or if they are many, others: most bugs do not depend on them."""
    if values.numel() <= _FEW_VALUES or values.dtype is torch.bool:
        return literal(values)
    shape, generator = tuple(values.shape), f"generator=torch.Generator().manual_seed({seed})"
    if values.is_floating_point() or values.is_complex():
        wide = torch.complex128 if values.is_complex() else torch.float64
        return f"torch.randn({shape}, {generator}, dtype={wide}).to({values.dtype})"
    return f"torch.randint(0, 4, {shape}, {generator}).to({values.dtype})"
