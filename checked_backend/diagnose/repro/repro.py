"""Write a repro: one script that shows a finding with nothing but torch, and run it before it is announced."""

from __future__ import annotations

import math
import os
import platform
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from checked_backend._torch.operators import operator_definition
from checked_backend.autostart import ON
from checked_backend.diagnose.kernel import KernelCode
from checked_backend.diagnose.oracle import Oracle, verdict_oracle, warm_up
from checked_backend.diagnose.reduce.failing_case import FailingCase
from checked_backend.diagnose.reduce.passes.details import in_float64
from checked_backend.diagnose.repro.compile_code import (
    CompileCode,
    Source,
    import_root,
    is_random,
    process_lines,
    write_compile,
)
from checked_backend.diagnose.repro.translate import write_program
from checked_backend.findings import Finding, Kind
from checked_backend.graphs.nodes import outputs_of
from checked_backend.process.job import die_with
from checked_backend.process.worker import cannot_fork
from checked_backend.regions.graph_case import GraphCase
from checked_backend.regions.process_state import ProcessState
from checked_backend.report.clean import in_docstring
from checked_backend.report.environment import run_command
from checked_backend.report.file_names import free_path
from checked_backend.report.write import write_whole
from checked_backend.scripts import comparisons
from checked_backend.scripts.values import TensorWriter, Untranslatable, write_value

BUG_THERE = "the bug is there"
BUG_GONE = "the bug is gone"

_LOAD_FILE = "from safetensors.torch import load_file  # pip install safetensors"
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
    script = _Script(folder, name, source)

    def finding_of(case: GraphCase) -> Finding | None:
        found = oracle(case, timeout) or ()
        return next((item for item in found if (item.kind, item.subject) == (kind, subject)), None)

    finding = finding_of(program.case)
    if finding is not None and is_drowned(finding):
        wide = in_float64(program)
        there = finding_of(wide.case)
        if there is not None and not is_drowned(there):
            program, finding = wide, there
            script.about.append("In float64: in lower precision rounding differs as much.")
    compiled = write_compile(program, random=True if kind is Kind.RNG else None)
    shown = finding or Finding(kind, subject, _NOT_SHOWN)
    output, first = "", ""
    for plain in (True, False):
        script.write(program, shown, compiled, plain=plain)
        if script.text == first:
            break
        repro = script.run(timeout)
        if repro.confirmed and shown.message == _NOT_SHOWN and shown.kind in (Kind.LOGIC, Kind.PRECISION):
            return Repro(script.path, False, f"{_NOT_SHOWN}: its noise is not known, and rounding alone may differ")
        if repro.confirmed:
            return repro
        output = repro.output
        if _took_too_long(output) or compiled.problem:
            break
        first = script.text
    return Repro(script.path, False, output)


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
    script = _Script(folder, f"{name}-kernel", source)
    script.about.append("The kernel and what it reads are as they were in the program.")
    program = FailingCase(code.case, "output[0]")
    if is_random(program):  # the compiler may draw other numbers
        return None
    script.write(program, finding, CompileCode(""), plain=True, compiled=code.lines)
    repro = script.run(timeout)
    if repro.confirmed:
        return repro
    for file in (script.path, script.values_path):
        file.unlink(missing_ok=True)
    return None


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
) -> Repro:
    """Write a script with a function's own source, for an error that Dynamo makes before there is a graph, and run it.

    It compiles with ``backend="eager"``: an error there is Dynamo's, whatever compiles Dynamo's graph.

    Raises:
        Untranslatable: The function needs something that a script cannot make.
        OSError: The folder cannot be written to.
    """
    if kwargs:
        raise Untranslatable("it is called with keyword arguments")
    script, needed = _Script(folder, name, source), Source()
    own = needed.add(function)
    first, inputs = script.values({f"x{place}": value for place, value in enumerate(args)})
    before, outside = script.values({f"{own}.{key}": value for key, value in needed.tensors.items()})
    body = [
        *([_LOAD_FILE] if script.saved else []),
        *needed.imports,
        *_function("make_inputs", (), [*first, f"return [{', '.join(inputs)}]"]),
        *before,
        *(f"{key} = {text}" for key, text in zip(needed.tensors, outside, strict=True)),
        *needed.lines,
    ]
    how = ", dynamic=True" if dynamic else ""
    lines = [f"program = {own}", f'compiled = torch.compile(program, backend="eager"{how})']
    script.assemble(title, body, lines, (comparisons.outcomes_differ, ")"), copied=True)
    return script.run(120)


def script_path(folder: Path, name: str) -> Path:
    """A free name for a script, in a folder that is made if it does not exist."""
    folder.mkdir(parents=True, exist_ok=True)
    return free_path(folder, "_".join(["repro", *re.findall("[A-Za-z0-9]+", name)]), ".py")


class _Script:
    """A script that is being written.

    Attributes:
        about: Lines for its docstring.
        saved: Tensors that it reads from a safetensors file next to it.
    """

    def __init__(self, folder: Path, name: str, source: str | None) -> None:
        self.path = script_path(folder, name)
        self.values_path = self.path.with_suffix(".safetensors")
        self.about = [f"Found at {source}"] if source else []
        self.text = ""
        self.saved: dict[str, torch.Tensor] = {}

    def write(
        self,
        program: FailingCase,
        finding: Finding,
        compile_code: CompileCode,
        *,
        plain: bool,
        compiled: Sequence[str] = (),
    ) -> None:
        """Write a program that shows a finding.

        Args:
            plain: Prefer calls of ``torch`` to operators.
            compiled: Lines that define ``compiled``, for a script that compiles nothing.
        """
        self.saved = {}
        written = write_program(program, plain=plain)
        operators = Source()
        for name in written.operators:
            if not any(f"custom_op({name!r}" in line for line in compile_code.lines):  # the compiler may refer to it
                definition = operator_definition(name)
                if definition is None:
                    raise Untranslatable(f"how the main program registers {name} is not known")
                operators.add_operator(definition)
        if operators.tensors:
            raise Untranslatable(f"{next(iter(written.operators))} refers to tensors of the running program")
        first, inputs = self.values(dict(zip(written.parameters, program.case.inputs, strict=True)))
        seed = ["torch.manual_seed(0)"] if is_random(program) else []
        imported = [module for module in written.imports if module in sys.modules]  # they may lie beside the program
        roots = {str(root): None for module in imported if (root := import_root(module))}
        body = [
            *(["import torch.nn.functional as F"] if any("F." in line for line in written.lines) else []),
            *([_LOAD_FILE] if self.saved else []),
            *operators.imports,
            *(["import sys", *(f"sys.path.insert(0, {root!r})" for root in roots)] if roots else []),
            *(f"import {module}" for module in written.imports),
            *(_unless_registered(name) for name in written.imported),
            *compile_code.lines,
            *(["", "", *operators.lines] if operators.lines else []),
            *process_lines(ProcessState.capture()),
            *_function("make_inputs", (), [*seed, *first, f"return [{', '.join(inputs)}]"]),
            *_function("program", written.parameters, written.lines),
        ]
        lines = compiled or [
            *([_cannot(compile_code.problem)] if compile_code.problem else []),
            f"compiled = torch.compile(program, {compile_code.arguments})",
        ]
        title = f"{finding.kind}: {finding.message.splitlines()[0] if finding.message else 'differs from eager'}"
        own = [*compile_code.lines, *operators.lines]
        copied = any(line.startswith("\n") for line in own)
        self.assemble(title, body, lines, _comparison(program, finding), copied=copied, compiles=not compiled)

    def values(self, values: Mapping[str, Any]) -> tuple[list[str], list[str]]:
        """The lines that come first, and an expression for each value; what is too long for that is saved."""
        writer = TensorWriter(value for value in values.values() if isinstance(value, torch.Tensor))
        texts = []
        for name, value in values.items():
            try:
                texts.append(writer.write(value, name) if isinstance(value, torch.Tensor) else write_value(value))
            except Untranslatable as error:
                raise Untranslatable(f"input {name} is a {type(value).__name__}: {error}") from None
        load = f'saved = load_file(__file__.rpartition("/")[0] + "/{self.values_path.name}")'
        self.saved |= writer.saved
        return [*([load] if writer.saved else []), *writer.lines], texts

    def assemble(
        self,
        title: str,
        body: Sequence[str],
        lines: Sequence[str],
        comparison: tuple[Callable[..., object], str],
        *,
        copied: bool,
        compiles: bool = True,
    ) -> None:
        """Put the text together.

        Args:
            body: What comes before the comparison.
            lines: They define ``compiled``.
            comparison: As of `_comparison`.
            copied: Whether it has a user's own source.
        """
        function, arguments = comparison
        source = comparisons.source_of(function)
        standard = [f"import {name}" for name in ("os", "signal") if any(f"{name}." in line for line in source)]
        machine = f"{platform.system()} {platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"
        text = [
            f'"""{in_docstring(title[:200])}',
            "",
            f"torch {torch.__version__}, Python {platform.python_version()}, {machine}",
            *map(in_docstring, self.about),
            "Exits 1 while the bug is there, 0 when it is gone."
            if compiles
            else "Exits 1: the kernel is as it was generated.",
            '"""',
            # copied source may have annotations whose names the script lacks
            *(["from __future__ import annotations", ""] if copied else []),
            *([*standard, ""] if standard else []),
            "import torch",
            *body,
            *source,
            "",
            "",
            "torch.set_grad_enabled(False)",
            *lines,
            f"wrong = {function.__name__}(program, compiled, make_inputs{arguments}",
            f'print("{BUG_THERE}" if wrong else "{BUG_GONE}")',
            "raise SystemExit(int(wrong))",
        ]
        self.text = re.sub(r"\n{4,}", "\n\n\n", "\n".join(text)) + "\n"

    def run(self, timeout: float) -> Repro:
        """Write the script, with the values that it reads, and run it from disk in a fresh process.

        Args:
            timeout: Seconds for each run. A script that gave no result is run again, unless it took too long.
        """
        if self.saved:
            write_whole(save(self.saved), self.values_path)
        write_whole(self.text, self.path)
        confirmed, output = _run(self.path, timeout)
        if not confirmed and BUG_GONE not in output and not _took_too_long(output):
            # a busy machine may have failed to start the process
            confirmed, output = _run(self.path, timeout)
        return Repro(self.path, confirmed, output)


def _took_too_long(output: str) -> bool:
    return output.startswith(subprocess.TimeoutExpired.__name__)


def _run(path: Path, timeout: float) -> tuple[bool, str]:
    """Run the script without graph caches: code that another compiler made must not be taken for this one's."""
    environment = {**os.environ, "TORCHINDUCTOR_FX_GRAPH_CACHE": "0", "TORCHINDUCTOR_AUTOGRAD_CACHE": "0"}
    environment[ON] = "0"  # the script is no part of the user's program
    try:
        ends_with_us = None if cannot_fork() else partial(die_with, os.getpid())
        command = [sys.executable, str(path.resolve())]
        done = run_command(command, timeout, env=environment, preexec_fn=ends_with_us)
    except (OSError, subprocess.SubprocessError) as error:
        return False, f"{type(error).__name__}: {error}"
    confirmed = done.returncode == 1 and BUG_THERE in done.stdout
    return confirmed, (done.stdout + ("" if confirmed else done.stderr)).strip()


def _function(name: str, parameters: Sequence[str], lines: Sequence[str]) -> list[str]:
    return ["", "", f"def {name}({', '.join(parameters)}):", *(f"    {line}" for line in lines), "", ""]


def _unless_registered(name: str) -> str:
    """What ends a script that lacks an operator: both sides would raise the same, as if the bug were gone."""
    namespace, _, own = name.partition("::")
    return textwrap.dedent(
        f"""\

        if not hasattr(torch.ops.{namespace}, {own!r}):
            print("the operator {name} is not registered: import the module that defines it")
            raise SystemExit(2)"""
    )


def _cannot(problem: str) -> str:
    return textwrap.dedent(
        f"""\
        backend = None  # name it here
        if backend is None:
            print({f"the backend is not named in this script: {in_docstring(problem)}"!r})
            raise SystemExit(2)
        """
    )


def _comparison(program: FailingCase, finding: Finding) -> tuple[Callable[..., object], str]:
    """The function by which a script compares, and the end of its call, after the arguments that all have."""
    index = f", index={program.tracked or 0}" if len(outputs_of(program.case.graph.graph)) > 1 else ""
    tolerance, why = _tolerance(finding)
    within = f", tolerance={tolerance!r}"
    if finding.kind is Kind.ALIAS:
        return comparisons.relations_differ, ")"
    if finding.detail == "mutation.wrong":
        return comparisons.inputs_differ, f"{within})  # {why}"
    if finding.kind is Kind.MUTATION:
        return comparisons.writes_differ, f", counted={finding.detail == 'mutation.uncounted'})"
    if finding.kind is Kind.NONFINITE:
        return comparisons.nonfinite_differs, f"{index})"
    if finding.kind is Kind.STRUCTURE and program.tracked is not None:
        return comparisons.structure_differs, f"{index})"
    if finding.detail in ("crash.signal", "crash.memory", "crash.exit", "crash.hang"):
        return comparisons.compiled_dies, ")"
    if finding.kind in (Kind.CRASH, Kind.EXCEPTION):
        return comparisons.exceptions_differ, ")"
    if finding.kind is Kind.RNG:
        return comparisons.random_state_differs, ")"
    return comparisons.values_differ, f"{within}{index})  # {why}"


def is_drowned(finding: Finding) -> bool:
    """Whether the greatest difference by rounding may be as large as the bug's, for example if sizes vary much."""
    return (
        finding.metrics is not None and finding.noise is not None and finding.noise.max >= finding.metrics.max_abs_diff
    )


def _tolerance(finding: Finding) -> tuple[float, str]:
    """A tolerance between the difference by rounding and the difference by the bug, and the reason for it."""
    bug = finding.metrics.max_abs_diff if finding.metrics is not None else 0.0
    noise = finding.noise.max if finding.noise is not None else None
    if noise == 0 or not bug > 0:
        return 0.0, "no rounding explains a difference"
    if noise is None:
        size = finding.metrics.reference_rms if finding.metrics is not None else 0.0
        # what a kernel reads outside of its memory may be of any size
        return _power_of_ten(min(bug, size or bug) / 2), "less than half of the difference, and of the values"
    if not math.isfinite(bug):
        return _power_of_ten(100 * noise), f"rounding explains {noise:.1e}"
    if is_drowned(finding):
        return _power_of_ten(
            bug / 2
        ), f"rounding may explain {noise:.1e}: where the bug is gone, look at the values too"
    return _power_of_ten(math.sqrt(noise * bug)), f"rounding explains {noise:.1e}"


def _power_of_ten(number: float) -> float:
    return 10.0 ** math.floor(math.log10(number)) if 0 < number < math.inf else 0.0
