"""The text of a repro."""

from __future__ import annotations

import math
import platform
import re
import sys
import textwrap
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from checked_backend._torch.operators import OperatorDefinition, operator_definition
from checked_backend.diagnose.reduce.failing_case import FailingCase
from checked_backend.diagnose.repro.compile_code import CompileCode, import_root, is_random, process_lines
from checked_backend.diagnose.repro.function_source import Source
from checked_backend.diagnose.repro.translate import write_program
from checked_backend.findings import Finding, Kind
from checked_backend.graphs.nodes import outputs_of
from checked_backend.regions.process_state import ProcessState
from checked_backend.scripts import comparisons
from checked_backend.scripts.values import TensorWriter, Untranslatable, write_value

BUG_THERE = "the bug is there"
BUG_GONE = "the bug is gone"

_LOAD_FILE = "from safetensors.torch import load_file  # pip install safetensors"


@dataclass(frozen=True, slots=True)
class Script:
    """A script and the tensors that it reads.

    Attributes:
        saved: Tensors that it reads from a safetensors file next to it.
    """

    text: str
    saved: dict[str, torch.Tensor]


def write_script(
    program: FailingCase,
    finding: Finding,
    compile_code: CompileCode,
    *,
    plain: bool,
    values_file: str,
    about: Sequence[str] = (),
    compiled: Sequence[str] = (),
) -> Script:
    """Write a script that shows a finding.

    Args:
        plain: Prefer calls of ``torch`` to operators.
        compiled: Lines that define ``compiled``, for a script that compiles nothing.
        values_file: Name of the file for values that are too many to be written.

    Raises:
        Untranslatable: The program cannot be written.
    """
    written = write_program(program, plain=plain)
    operators = Source()
    for name in written.operators:
        if not any(f"custom_op({name!r}" in line for line in compile_code.lines):  # the compiler may refer to it
            operators.add_operator(_definition(name))
    if operators.tensors:
        raise Untranslatable(f"{next(iter(written.operators))} refers to tensors of the running program")
    first, inputs, saved = _values(dict(zip(written.parameters, program.case.inputs, strict=True)), values_file)
    seed = ["torch.manual_seed(0)"] if is_random(program) else []
    body = [
        *(["import torch.nn.functional as F"] if any("F." in line for line in written.lines) else []),
        *([_LOAD_FILE] if saved else []),
        *operators.imports,
        *_imports(written.imports),
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
    copied = compile_code.copied or bool(operators.lines)
    text = _assembled(title, about, body, lines, _comparison(program, finding), copied=copied, compiles=not compiled)
    return Script(text, saved)


def write_source_script(
    function: Callable[..., Any],
    args: Sequence[Any],
    *,
    title: str,
    values_file: str,
    about: Sequence[str] = (),
    dynamic: bool | None = None,
) -> Script:
    """Write a script with a function's own source, for an error that Dynamo makes before there is a graph.

    It compiles with ``backend="eager"``: an error there is Dynamo's, whatever compiles Dynamo's graph.

    Raises:
        Untranslatable: The function needs something that a script cannot make.
    """
    source = Source()
    name = source.add(function)
    first, inputs, saved = _values({f"x{place}": value for place, value in enumerate(args)}, values_file)
    before, values, outside = _values({f"{name}.{key}": value for key, value in source.tensors.items()}, values_file)
    body = [
        *([_LOAD_FILE] if saved or outside else []),
        *source.imports,
        *_function("make_inputs", (), [*first, f"return [{', '.join(inputs)}]"]),
        *before,
        *(f"{key} = {text}" for key, text in zip(source.tensors, values, strict=True)),
        *source.lines,
    ]
    how = ", dynamic=True" if dynamic else ""
    lines = [f"program = {name}", f'compiled = torch.compile(program, backend="eager"{how})']
    text = _assembled(title, about, body, lines, (comparisons.outcomes_differ, ")"), copied=True)
    return Script(text, {**saved, **outside})


def _values(values: Mapping[str, Any], file: str) -> tuple[list[str], list[str], dict[str, torch.Tensor]]:
    """The lines that come first, an expression for each value, and the tensors that these read from a file."""
    writer = TensorWriter(value for value in values.values() if isinstance(value, torch.Tensor))
    texts = []
    for name, value in values.items():
        try:
            texts.append(writer.write(value, name) if isinstance(value, torch.Tensor) else write_value(value))
        except Untranslatable as error:
            raise Untranslatable(f"input {name} is a {type(value).__name__}: {error}") from None
    load = [f'saved = load_file(__file__.rpartition("/")[0] + "/{file}")'] if writer.saved else []
    return [*load, *writer.lines], texts, writer.saved


def _function(name: str, parameters: Sequence[str], lines: Sequence[str]) -> list[str]:
    return ["", "", f"def {name}({', '.join(parameters)}):", *(f"    {line}" for line in lines), "", ""]


def _assembled(
    title: str,
    about: Sequence[str],
    body: Sequence[str],
    lines: Sequence[str],
    comparison: tuple[Callable[..., object], str],
    *,
    copied: bool,
    compiles: bool = True,
) -> str:
    function, arguments = comparison
    source = comparisons.source_of(function)
    standard = [f"import {name}" for name in ("os", "signal") if any(f"{name}." in line for line in source)]
    machine = f"{platform.system()} {platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"
    text = [
        f'"""{_safe(title[:200])}',
        "",
        f"torch {torch.__version__}, Python {platform.python_version()}, {machine}",
        *map(_safe, about),
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
    return re.sub(r"\n{4,}", "\n\n\n", "\n".join(text)) + "\n"


def _definition(name: str) -> OperatorDefinition:
    found = operator_definition(name)
    if found is None:
        raise Untranslatable(f"how the main program registers {name} is not known")
    return found


def _imports(modules: Collection[str]) -> list[str]:
    """Import modules of the user's, also where they lie beside the program."""
    roots = {str(root): None for module in modules if module in sys.modules and (root := import_root(module))}
    paths = ["import sys", *(f"sys.path.insert(0, {root!r})" for root in roots)] if roots else []
    return [*paths, *(f"import {module}" for module in modules)]


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
            print({f"the backend is not named in this script: {_safe(problem)}"!r})
            raise SystemExit(2)
        """
    )


def _safe(text: str) -> str:
    """Text that can stand in a docstring or a comment."""
    return text.replace("\\", "/").replace('"""', "'''").replace("\n", " ")


def _comparison(program: FailingCase, finding: Finding) -> tuple[Callable[..., object], str]:
    """The function by which a script compares, and the end of its call, after the arguments that all have."""
    index = f", index={program.tracked or 0}" if len(outputs_of(program.case.graph.graph)) > 1 else ""
    tolerance, why = _tolerance(finding)
    within = f", tolerance={tolerance!r}"
    if finding.kind is Kind.ALIAS:
        return comparisons.relations_differ, ")"
    if finding.detail == "mutation.wrong":
        return comparisons.inputs_differ, f"{within})  # {why}"
    if finding.detail == "mutation.uncounted":
        return comparisons.counted_writes_differ, ")"
    if finding.kind is Kind.MUTATION:
        return comparisons.which_inputs_change_differs, ")"
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
