"""Run a program in eager as long as torch defines what it computes; and the same program on other values."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from checked_backend.errors import FuzzError
from checked_backend.fuzz.build import dtype_name, run_call, run_eager, same_value
from checked_backend.fuzz.generate.undefined import is_undefined
from checked_backend.fuzz.program import DTYPES, FuzzProgram, Statement
from checked_backend.random_state import random_untouched

MOST_ELEMENTS = 4096
"""The most elements of a value."""

_OTHER = 1_000_003


def run_defined(program: FuzzProgram) -> list[Any]:
    """The values of a program in eager.

    Raises:
        Exception: Eager refuses it, torch leaves a result open, or it is one that programs cannot have.
    """
    return run_eager(program, partial(run_defined_call, gradients=program.gradients))


def run_defined_call(call: Statement, known: Sequence[Any], *, gradients: bool) -> Any:
    """Run one call in eager, given all earlier values; it raises as `run_defined` does."""
    with warnings.catch_warnings(), torch.set_grad_enabled(gradients):
        warnings.simplefilter("ignore")
        if is_undefined(call, known):
            raise FuzzError(f"{call.op}: not defined")
        value = run_call(call, known)
    if call.op != "setitem" and not is_usable(value):
        raise FuzzError(f"{call.op}: too large")
    return value


def is_usable(value: Any) -> bool:
    """Whether a program may have this value: a small tensor of a known dtype, or a few of them."""
    if isinstance(value, torch.Tensor):
        return value.layout is torch.strided and value.numel() <= MOST_ELEMENTS and dtype_name(value) in DTYPES
    return isinstance(value, tuple | list) and bool(value) and len(value) < 20 and all(map(is_usable, value))


def on_other_values(program: FuzzProgram) -> FuzzProgram:
    """The same program on other values; where torch would not define the result, on its own integers, or as it is."""
    for dtypes in (DTYPES, [name for name in DTYPES if name.startswith(("float", "bfloat", "complex"))]):
        inputs = tuple(
            replace(given, seed=given.seed + _OTHER) if given.dtype in dtypes else given for given in program.inputs
        )
        other = replace(program, inputs=inputs)
        if inputs != program.inputs and _is_defined(other):
            return other
    return program


def _is_defined(program: FuzzProgram) -> bool:
    try:
        with random_untouched():
            torch.manual_seed(0)
            run_defined(program)
            return runs_alike(program)
    except Exception:  # whatever torch raises: eager refuses these values
        return False


def runs_alike(program: FuzzProgram) -> bool:
    """Whether eager runs a program, and gives the same twice; forward, and backward if it is differentiated."""
    try:
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
            warnings.simplefilter("ignore")
            first, second = (_results(program) for _ in range(2))
    except Exception:  # whatever torch raises: it is no program
        return False
    return len(first) == len(second) and all(map(same_value, first, second))


def _results(program: FuzzProgram) -> list[Any]:
    torch.manual_seed(0)
    with torch.set_grad_enabled(program.gradients):
        values = run_eager(program)
        results = [values[place] for place in program.returns]
        if not program.gradients:
            return results + values[: len(program.inputs)]
        wanted = [value for value in results if isinstance(value, torch.Tensor) and value.requires_grad]
        if not wanted:
            raise RuntimeError("nothing to differentiate")
        torch.autograd.backward(wanted, [torch.ones_like(value) for value in wanted])
    grads = [value.grad for value in values[: len(program.inputs)] if value.grad is not None]
    return [*results, *values[: len(program.inputs)], *grads]
