"""The text of a repro."""

from __future__ import annotations

import math
import platform
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from checked_backend._torch.operators import OperatorDefinition, operator_definition
from checked_backend.diagnose.reduce.failing_case import FailingCase
from checked_backend.diagnose.repro.compile_code import CompileCode, import_root, is_random
from checked_backend.diagnose.repro.function_source import Source
from checked_backend.diagnose.repro.inputs_code import write_inputs
from checked_backend.diagnose.repro.process_code import process_lines
from checked_backend.diagnose.repro.translate import Untranslatable, write_program
from checked_backend.findings import Finding, Kind
from checked_backend.graphs.nodes import outputs_of
from checked_backend.regions.process_state import ProcessState

__all__ = ["BUG_GONE", "BUG_THERE", "Script", "facts", "is_drowned", "safe", "write_script"]

BUG_THERE = "the bug is there"
BUG_GONE = "the bug is gone"

_VERDICT = f'print("{BUG_THERE}" if wrong else "{BUG_GONE}")\nraise SystemExit(int(wrong))\n'

_RUN_BOTH = """\
expected = program(*make_inputs()){index}
actual = compiled(*make_inputs()){index}
"""

_VALUES = (
    _RUN_BOTH
    + """\
print("eager:   ", expected)
print("compiled:", actual)
difference = (actual.to(torch.{wide}) - expected.to(torch.{wide})).abs().max().item()
print("greatest difference:", difference)
wrong = not torch.allclose(actual, expected, rtol=0, atol={tolerance!r}, equal_nan=True)  # {why}
"""
)

_NONFINITE = (
    _RUN_BOTH
    + """\
print("eager:   ", expected)
print("compiled:", actual)
wrong = not (torch.equal(actual.isnan(), expected.isnan()) and torch.equal(actual.isinf(), expected.isinf()))
"""
)

_STRUCTURE = (
    _RUN_BOTH
    + """\
expected, actual = [(value.dtype, tuple(value.shape), value.stride()) for value in (expected, actual)]
print("eager:   ", expected)
print("compiled:", actual)
wrong = actual != expected
"""
)

_RELATIONS = """\


def relations(run):
    inputs = make_inputs()
    results = run(*inputs)
    results = results if isinstance(results, tuple) else (results,)
    values = [*inputs, *results]
    pairs = [(i, j) for j in range(len(inputs), len(values)) for i in range(j)]
    shared = [(i, j) for i, j in pairs if memory(values[i]) == memory(values[j])]
    return shared, [(i, j) for i, j in pairs if values[i] is values[j]]


def memory(tensor):
    return tensor.untyped_storage()._cdata if isinstance(tensor, torch.Tensor) else object()


expected, actual = relations(program), relations(compiled)
print("inputs and results, counted together, that share memory, and that are the same object")
print("eager:   ", expected)
print("compiled:", actual)
wrong = actual != expected
"""

_MUTATION = """\
expected, actual = make_inputs(), make_inputs()
program(*expected)
compiled(*actual)
print("inputs afterwards, eager:   ", expected)
print("inputs afterwards, compiled:", actual)
pairs = [pair for pair in zip(expected, actual) if isinstance(pair[0], torch.Tensor) and pair[0].numel()]
pairs = [(one.to(torch.{wide}), other.to(torch.{wide})) for one, other in pairs]
print("greatest difference:", max((other - one).abs().max().item() for one, other in pairs))
wrong = not all(torch.allclose(other, one, rtol=0, atol={tolerance!r}, equal_nan=True) for one, other in pairs)
"""

_CHANGED = """\


def changed(run):
    before, after = make_inputs(), make_inputs()
    run(*after)
    pairs = [(i, *pair) for i, pair in enumerate(zip(before, after)) if isinstance(pair[0], torch.Tensor)]
    return [i for i, one, other in pairs if not torch.allclose(other, one, rtol=0, atol=0, equal_nan=True)]


expected, actual = changed(program), changed(compiled)
print("inputs that hold something else afterwards, counted from 0")
print("eager:   ", expected)
print("compiled:", actual)
wrong = actual != expected
"""

_COUNTS = """\


def written(run):
    before, after = make_inputs(), make_inputs()
    versions = [value._version if isinstance(value, torch.Tensor) else 0 for value in after]
    run(*after)
    tensors = [i for i, value in enumerate(after) if isinstance(value, torch.Tensor)]
    changed = [i for i in tensors if not torch.allclose(after[i], before[i], rtol=0, atol=0, equal_nan=True)]
    return changed, [i for i in tensors if after[i]._version != versions[i]]


expected, actual = written(program), written(compiled)
print("inputs that hold something else afterwards, and those to which a write was counted, from 0")
print("eager:   ", expected)
print("compiled:", actual)
wrong = any(i in expected[1] and i in actual[0] and i not in actual[1] for i in expected[0])
"""

_EXCEPTION = """\
results = []
for name, run in ("eager", program), ("compiled", compiled):
    try:
        results.append(run(*make_inputs()))
    except Exception as error:
        results.append(error)
    print(f"{{name}}:", repr(results[-1])[:2000])
wrong = isinstance(results[0], Exception) != isinstance(results[1], Exception)
"""

_RANDOM_STATE = """\
compiled(*make_inputs())  # what compiling itself draws does not count
drawn = []
for run in program, compiled:
    inputs = make_inputs()
    torch.manual_seed(0)
    run(*inputs)
    drawn.append(torch.rand(()).item())
print("the next random number after eager:   ", drawn[0])
print("the next random number after compiled:", drawn[1])
wrong = drawn[0] != drawn[1]
"""

_DEATH = """\
print("eager:", program(*make_inputs()))
child = os.fork()  # what dies is this child
if child == 0:
    signal.alarm({seconds})  # what hangs dies too
    compiled(*make_inputs())
    os._exit(0)
status = os.waitpid(child, 0)[1]
print("compiled: exit status", status)
wrong = status != 0
"""


_MUTATIONS = {"mutation.wrong": _MUTATION, "mutation.uncounted": _COUNTS}
"""Scripts for findings about mutations that are not about which inputs change."""


@dataclass(frozen=True, slots=True)
class Script:
    """A script and the tensors that it reads.

    Attributes:
        text: The script.
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
) -> Script:
    """Write a script that shows a finding.

    Args:
        finding: The finding that it shows.
        plain: Prefer calls of ``torch`` to operators.
        values_file: Name of the file for values that are too many to be written.
        about: Lines for the docstring: the user's line, the steps that were tried.

    Raises:
        Untranslatable: The program cannot be written.
    """
    written = write_program(program, plain=plain)
    operators = Source()
    for name in written.operators:
        if not any(f"custom_op({name!r}" in line for line in compile_code.lines):  # the compiler may refer to it
            operators.add_operator(_definition(name))
    if operators.tensors:
        raise Untranslatable(f"{written.operators[0]} refers to tensors of the running program")
    inputs = write_inputs(dict(zip(written.parameters, program.case.inputs, strict=True)))
    tail = _tail(program, finding)
    body = "\n".join(written.lines)
    standard = [module for module in ("os", "signal") if f"{module}." in tail]
    imports = [
        *(["from __future__ import annotations", ""] if compile_code.copied or operators.lines else []),
        *(f"import {module}" for module in standard),
        *([""] if standard else []),
        "import torch",
        *(["import torch.nn.functional as F"] if "F." in body else []),
        *(["from safetensors.torch import load_file  # pip install safetensors"] if inputs.saved else []),
        *operators.imports,
        *_imports(written.imports),
        *(_unless_registered(name) for name in written.imported),
        *compile_code.lines,
        *(["", "", *operators.lines] if operators.lines else []),
        *process_lines(ProcessState.capture()),
    ]
    making = [
        *(["torch.manual_seed(0)"] if is_random(program) else []),
        *([f'saved = load_file(__file__.rpartition("/")[0] + "/{values_file}")'] if inputs.saved else []),
        *inputs.lines,
        f"return [{', '.join(inputs.values)}]",
    ]
    text = "\n".join(
        [
            f'"""{_title(finding)}',
            "",
            *(safe(line) for line in (*facts(), *about)),
            "Exits 1 while the bug is there, 0 when it is gone.",
            '"""',
            *imports,
            "",
            "",
            "def make_inputs():",
            *(f"    {line}" for line in making),
            "",
            "",
            f"def program({', '.join(written.parameters)}):",
            *(f"    {line}" for line in written.lines),
            "",
            "",
            *([_cannot(compile_code.problem)] if compile_code.problem else []),
            "torch.set_grad_enabled(False)",
            f"compiled = torch.compile(program, {compile_code.arguments})",
            tail + _VERDICT,
        ]
    )
    return Script(text, inputs.saved)


def _definition(name: str) -> OperatorDefinition:
    found = operator_definition(name)
    if found is None:
        raise Untranslatable(f"how the main program registers {name} is not known")
    return found


def _imports(modules: Sequence[str]) -> list[str]:
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
            print({f"the backend is not named in this script: {safe(problem)}"!r})
            raise SystemExit(2)
        """
    )


def facts() -> tuple[str, ...]:
    """Versions and hardware, as lines for a docstring."""
    machine = f"{platform.system()} {platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"
    return (f"torch {torch.__version__}, Python {platform.python_version()}, {machine}",)


def _title(finding: Finding) -> str:
    return safe(f"{finding.kind}: {finding.message.splitlines()[0] if finding.message else 'differs from eager'}"[:200])


def safe(text: str) -> str:
    """Text that can stand in a docstring or a comment."""
    return text.replace("\\", "/").replace('"""', "'''").replace("\n", " ")


def _tail(program: FailingCase, finding: Finding) -> str:
    returned = outputs_of(program.case.graph.graph)
    tracked = program.tracked
    index = "" if len(returned) == 1 else f"[{tracked or 0}]"
    tolerance, why = _tolerance(finding)
    tensors = [value for value in program.case.inputs if isinstance(value, torch.Tensor)]
    wide = "complex128" if any(tensor.is_complex() for tensor in tensors) else "float64"
    numbers = {"index": index, "tolerance": tolerance, "why": why, "wide": wide}
    if finding.kind is Kind.ALIAS:
        return _RELATIONS
    if finding.kind is Kind.MUTATION:
        return _MUTATIONS.get(finding.detail, _CHANGED).format(**numbers)
    if finding.kind is Kind.NONFINITE:
        return _NONFINITE.format(**numbers)
    if finding.kind is Kind.STRUCTURE and tracked is not None:
        return _STRUCTURE.format(**numbers)
    if finding.kind is Kind.CRASH and finding.detail in ("crash.signal", "crash.memory", "crash.exit", "crash.hang"):
        return _DEATH.format(seconds=60)
    if finding.kind in (Kind.CRASH, Kind.EXCEPTION):
        return _EXCEPTION.format()
    if finding.kind is Kind.RNG:
        return _RANDOM_STATE
    return _VALUES.format(**numbers)


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
        return _power_of_ten(bug / 2), "what rounding explains is not known"
    if not math.isfinite(bug):
        return _power_of_ten(100 * noise), f"rounding explains {noise:.1e}"
    if is_drowned(finding):
        return _power_of_ten(
            bug / 2
        ), f"rounding may explain {noise:.1e}: where the bug is gone, look at the values too"
    return _power_of_ten(math.sqrt(noise * bug)), f"rounding explains {noise:.1e}"


def _power_of_ten(number: float) -> float:
    return 10.0 ** math.floor(math.log10(number)) if 0 < number < math.inf else 0.0
