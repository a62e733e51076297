"""A small stand-in for a checkout of PyTorch with torchfuzz: the same files, functions and shape of programs."""

from __future__ import annotations

from pathlib import Path

_OPS_FUZZER = """
import random
from typing import NamedTuple

import torch


class Spec(NamedTuple):
    size: tuple
    stride: tuple


def fuzz_spec(template="default"):
    assert template == "default"
    return random.choice([Spec((2, 3), (3, 1)), Spec((4,), (1,)), Spec((2, 3), (1, 1)), Spec((), ())])


def fuzz_operation_graph(target_spec, max_depth=7, seed=None, template="default"):
    random.seed(seed)
    torch.manual_seed(seed)
    return target_spec, [random.choice(BODIES) for _ in range(max_depth)]


BODIES = BODIES_HERE
"""

_CODEGEN = """
import random


def convert_graph_to_python_code(operation_graph, seed=None, template="default"):
    spec, bodies = operation_graph
    reach = 1 + sum((size - 1) * step for size, step in zip(spec.size, spec.stride))
    lines = ["import torch", "torch.set_default_device('cuda')", "torch._dynamo.config.capture_scalar_outputs = True"]
    lines += ["", f"torch.manual_seed({seed})", "", "def fuzzed_program(arg_0, arg_1, sentinel):", "    var = arg_0"]
    lines += [f"    var = {body}" for body in bodies]
    lines += ["    result = var * sentinel", "    if result.is_complex():", "        result = result.real"]
    lines += ["    return result", "", "sentinel = torch.tensor(1.0, requires_grad=True)"]
    for name in ("arg_0", "arg_1"):
        lines.append(f"{name} = torch.as_strided(torch.randn({reach}), {spec.size}, {spec.stride})")
    lines += ["", "args = (arg_0, arg_1, sentinel)", "result_original = fuzzed_program(*args)"]
    lines += ["compiled_program = torch.compile(fuzzed_program, fullgraph=True, dynamic=True)"]
    lines += ["raise SystemExit('the oracle of torchfuzz was run')"]
    return "\\n".join(lines)
"""


def write_checkout(folder: Path, *bodies: str) -> Path:
    """Write a checkout whose programs are made of these expressions in ``var``, ``arg_0`` and ``arg_1``."""
    package = folder / "tools" / "experimental" / "torchfuzz"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "codegen.py").write_text(_CODEGEN)
    (package / "ops_fuzzer.py").write_text(_OPS_FUZZER.replace("BODIES_HERE", repr(list(bodies))))
    return folder
