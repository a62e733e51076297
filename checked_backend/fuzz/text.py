"""Print a program as a torch function, and as a script that needs torch alone."""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from checked_backend.fuzz.build import make_inputs, storage_sizes, strides_of
from checked_backend.fuzz.generate.defined import on_other_values
from checked_backend.fuzz.generate.undefined import draws
from checked_backend.fuzz.program import FuzzProgram
from checked_backend.fuzz.source import function_of
from checked_backend.report.clean import clean

__all__ = ["DIFFERS", "PLANTED", "describe", "describe_inputs", "render_check", "render_function", "render_script"]

DIFFERS = "eager and compiled differ"
"""The last line that a script of torch alone prints where the bug is."""

PLANTED = "planted"
"""The word in front of the name of a planted fault, with a colon between them."""

_FEW_VALUES = 64


def render_function(program: FuzzProgram) -> str:
    """A program as the source of a function of torch calls."""
    return ast.unparse(function_of([program]))


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
    return "\n".join([*(f"# {line}" for line in describe_inputs(program)), render_function(program)])


def render_script(
    program: FuzzProgram, compiler: str = "inductor", about: Sequence[str] = (), *, again: bool = False
) -> str:
    """A program as a script that compares eager and compiled. It needs torch alone.

    Args:
        again: Whether to call it again, on other values and on the first ones, before the results are compared.
    """
    call = _DIFFERENTIATE if program.gradients else _CALL
    how = ", dynamic=True" if program.dynamic else ""
    if compiler == "inductor" and any(draws(call.op) for call in program.calls):
        how += ', options={"fallback_random": True}'  # else its random numbers are others than eager's
    imports, backend = _backend(compiler)
    compiled = f"torch.compile(program, backend={backend}{how})"
    lines = [*_head(program, about, imports=(*_NEEDED, *imports))]
    if again:
        lines += _inputs(on_other_values(program), "other_inputs", seed=1)
    compare = _COMPARE.replace("{compiled}", compiled).replace("{DIFFERS}", DIFFERS)
    return "\n".join([*lines, call, _RUN, _THREE_CALLS if again else _ONE_CALL, _MOVED, compare])


def render_check(
    program: FuzzProgram,
    compiler: str,
    options: Mapping[str, Any],
    about: Sequence[str] = (),
    *,
    again: bool = False,
) -> str:
    """A program as a script that checks it: for what a plain comparison does not show, as the sign of a zero.

    Args:
        program: The program. Its inputs are written with all their values.
        again: Whether to call it again, as fuzz does.
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
    needed = ("import checked_backend", *(["from checked_backend.checking.effort import Effort"] if again else []))
    head = [*_head(program, [*about, _NEEDS], exact=True, imports=(*needed, *imports))]
    if again:
        head += _inputs(on_other_values(program), "other_inputs", exact=True)
    return "\n".join([*head, check, 'raise SystemExit(1 if report.verdict == "fail" else 0)', ""])


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


def _head(
    program: FuzzProgram, about: Sequence[str], *, exact: bool = False, imports: Sequence[str] = ()
) -> Sequence[str]:
    """The lines that define a program and its inputs."""
    text = "\n".join(_in_docstring(line) for line in about)
    return [
        f'"""{text}"""\n',
        "import torch",
        "import torch.nn.functional as F",
        *imports,
        "\n",
        render_function(program),
        "\n",
        *_inputs(program, "inputs", exact=exact),
    ]


def _inputs(program: FuzzProgram, name: str, *, exact: bool = False, seed: int = 0) -> Sequence[str]:
    """The lines of a function that makes a program's inputs; values of large ones are those of a seed."""
    made = make_inputs(program.inputs)
    storages: list[str] = []
    inputs: list[str] = []
    sizes = storage_sizes(program.inputs)
    for place, given in enumerate(program.inputs):
        root = place if given.shares is None else given.shares
        if root == place:
            storage = made[place].as_strided((sizes[place],), (1,), 0)
            few = exact or sizes[place] <= _FEW_VALUES or given.dtype == "bool"
            values = _exactly(storage, given.dtype) if few else _random(storage, given.dtype, seed)
            storages.append(f"    m{place} = {values}")
        grad = ".requires_grad_()" if given.requires_grad else ""
        inputs.append(f"m{root}.as_strided({given.shape}, {given.stride}, {given.offset}).detach(){grad}")
    arguments = ", ".join(inputs) + ("," if len(inputs) == 1 else "")
    return [f"def {name}():", *storages, f"    return ({arguments})", "\n"]


def _in_docstring(text: str) -> str:
    """A text, which may be a compiler's message, as a part of a docstring."""
    plain = clean(text).replace("\\", "\\\\").replace('"""', "'''")
    return f'{plain[:-1]}\\"' if plain.endswith('"') else plain


_NEEDS = "This needs the package checked_backend; a plain comparison does not show it."

_NEEDED = ("import traceback", "from torch.utils._python_dispatch import TorchDispatchMode")

_CALL = """def call(function, given):
    with torch.no_grad():
        results = function(*given)
    return [*results, *given]"""

_DIFFERENTIATE = """def call(function, given):
    results = function(*given)
    loss = [r for r in results if isinstance(r, torch.Tensor) and r.requires_grad]
    torch.manual_seed(0)
    torch.autograd.backward(loss, [torch.randn_like(r) for r in loss])
    return [*results, *given, *(x.grad for x in given)]"""

_RUN = """

def run(function, inputs):
    torch.manual_seed(0)
    try:
        return call(function, inputs())
    except Exception as error:
        return [error]
"""

_ONE_CALL = """
def results(function):
    return run(function, inputs)
"""

_THREE_CALLS = """
def results(function):
    held, other = inputs(), other_inputs()

    def refilled():
        for old, new in zip(held, other_inputs()):
            if (old.shape, old.stride()) == (new.shape, new.stride()):
                old.untyped_storage().copy_(new.untyped_storage())
        return held

    then, now = [], []
    for make in (lambda: held, lambda: other, refilled):
        values = run(function, make)
        then += [r.detach().clone() if isinstance(r, torch.Tensor) else r for r in values]
        now += values
    return then + now
"""

_MOVED = """
class RoundedOtherwise(TorchDispatchMode):
    \"""Each operator's result is moved by a rounding, up or down.\"""

    def __init__(self, seed):
        super().__init__()
        self.signs = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        made = operator(*args, **(kwargs or {}))
        is_view = any(r.alias_info and not r.alias_info.is_write for r in operator._schema.returns)
        for part in made if isinstance(made, (tuple, list)) else [made]:
            if not is_view and isinstance(part, torch.Tensor) and (part.is_floating_point() or part.is_complex()):
                sign = 2 * torch.randint(0, 2, part.shape, generator=self.signs) - 1
                part.mul_(1 + torch.finfo(part.dtype).eps * sign.to(part.dtype))
        return made


def is_rounding(number, a, b):
    \"""Whether eager's own value moves as far by other roundings.\"""
    if not (a.is_floating_point() or a.is_complex()) or (a.shape, a.stride()) != (b.shape, b.stride()):
        return False
    wide = torch.complex128 if a.is_complex() else torch.float64
    value, spread = a.detach().to(wide), torch.zeros(a.shape, dtype=torch.float64)
    for seed in range(4):
        with RoundedOtherwise(seed):
            others = results(program)
        if number >= len(others) or not isinstance(others[number], torch.Tensor) or others[number].shape != a.shape:
            return False
        spread = torch.maximum(spread, (others[number].detach().to(wide) - value).abs().nan_to_num(0.0))
    off = (b.detach().to(wide) - value).abs()
    return bool(((off <= 8 * spread) | (value == b) | (value.isnan() & b.isnan())).all())
"""

_COMPARE = """
eager = results(program)
compiled = results({compiled})
wrong = 0
for number, (a, b) in enumerate(zip(eager, compiled)):
    if isinstance(a, Exception) or isinstance(b, Exception):
        wrong += not (isinstance(a, Exception) and isinstance(b, Exception))
        for side, value in (("eager", a), ("compiled", b)):
            raised = traceback.format_exception(value) if isinstance(value, Exception) else ["no exception"]
            print(f"{side}: {''.join(raised)}")
        break
    if not isinstance(a, torch.Tensor):
        continue
    rough = a.dtype in (torch.float16, torch.bfloat16)
    exact = not (a.is_floating_point() or a.is_complex())
    try:
        torch.testing.assert_close(
            b, a, rtol=0 if exact else 2e-2 if rough else 1e-4, atol=0, equal_nan=True, check_stride=True
        )
    except AssertionError as error:
        if is_rounding(number, a, b):
            continue
        wrong += 1
        print(f"value {number}: {error}\\neager\\n{a}\\ncompiled\\n{b}")
shared = [[(i, j) for i, a in enumerate(side) for j, b in enumerate(side[:i]) if isinstance(a, torch.Tensor)
           and isinstance(b, torch.Tensor) and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr() != 0]
          for side in (eager, compiled)]
if shared[0] != shared[1]:
    wrong += 1
    print("values that share memory: eager", shared[0], "compiled", shared[1])
print("{DIFFERS}" if wrong else "eager and compiled agree")
raise SystemExit(1 if wrong else 0)
"""


def _exactly(flat: Any, dtype: str) -> str:
    return f"torch.tensor([{', '.join(map(_number, flat.tolist()))}], dtype=torch.{dtype})"


def _random(flat: Any, dtype: str, seed: int) -> str:
    """Other values for a tensor of many, which most bugs do not depend on."""
    generator = f"generator=torch.Generator().manual_seed({seed})"
    if flat.is_floating_point() or flat.is_complex():
        wide = "complex128" if flat.is_complex() else "float64"
        return f"torch.randn({flat.numel()}, {generator}, dtype=torch.{wide}).to(torch.{dtype})"
    return f"torch.randint(0, 4, ({flat.numel()},), {generator}).to(torch.{dtype})"


def _number(raw: Any) -> str:
    if isinstance(raw, float) and not math.isfinite(raw):
        return f'float("{raw}")'
    return repr(raw)
