"""Make programs runnable: a Python function, which calls what the program names and nothing else."""

from __future__ import annotations

import ast
import builtins
import hashlib
import linecache
from collections.abc import Callable, Sequence
from types import CodeType, FunctionType
from typing import Any

import torch

from checked_backend.fuzz.control import run_in_order, straight_line
from checked_backend.fuzz.known import METHOD, operation
from checked_backend.fuzz.program import Constant, FuzzProgram, Ref, Size, Statement
from checked_backend.fuzz.source import NAME, function_of
from checked_backend.fuzz.values import make_inputs

__all__ = ["build", "inputs_for", "run_call", "run_eager", "run_statement", "straightened"]


def build(programs: Sequence[FuzzProgram]) -> Callable[..., Any]:
    """One function for several programs. It takes the inputs of all, and returns a tuple of results for each.

    Its code is the syntax tree that `checked_backend.fuzz.text` prints. The lines of that text are found where
    tracebacks look for source.

    Raises:
        FuzzError: It is no program, or calls what is not known.
    """
    tree = function_of(programs)
    text = ast.unparse(tree)
    file = f"<fuzz {hashlib.sha256(text.encode()).hexdigest()[:16]}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    module = compile(ast.Module([tree], []), file, "exec", dont_inherit=True)
    (code,) = (constant for constant in module.co_consts if isinstance(constant, CodeType))
    function = FunctionType(code, {"torch": torch, "F": torch.nn.functional, "__builtins__": builtins}, NAME)
    arguments = tree.args
    function.__kwdefaults__ = {
        given.arg: default.value
        for given, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        if isinstance(default, ast.Constant)
    }
    return function


def inputs_for(programs: Sequence[FuzzProgram]) -> tuple[torch.Tensor, ...]:
    """The inputs of the function that `build` makes."""
    return tuple(tensor for program in programs for tensor in make_inputs(program.inputs))


def run_call(call: Statement, known: Sequence[Any]) -> Any:
    """Run one call in eager.

    Args:
        known: The values so far.

    Raises:
        Exception: Whatever torch raises.
    """
    how, target = operation(call.op)
    args, kwargs = _values(call.args, known), _values(dict(call.kwargs), known)
    if how == METHOD:
        return getattr(args[0], target)(*args[1:], **kwargs)
    return target(*args, **kwargs)


def run_eager(program: FuzzProgram) -> list[Any]:
    """Run a program in eager on fresh inputs, and return all of its values.

    Raises:
        Exception: Whatever torch raises.
    """
    known: list[Any] = list(make_inputs(program.inputs))
    run_in_order(program, known, lambda place, call: run_statement(place, call, known, len(program.inputs)))
    return known


def run_statement(place: int, call: Statement, known: list[Any], inputs: int) -> None:
    """Run a call or a ``let`` in eager, and keep its value.

    Args:
        place: Its position.
        known: The values, by number.
        inputs: How many inputs there are.

    Raises:
        Exception: Whatever torch raises.
    """
    if call.op == "let":
        target, source = call.args
        known[target.value] = known[source.value]
    else:
        known[inputs + place] = run_call(call, known)


def straightened(program: FuzzProgram) -> FuzzProgram:
    """The same program without loops and branches: the calls that it makes with its inputs, in order.

    Raises:
        Exception: Whatever torch raises.
    """
    return straight_line(program, run_call, make_inputs(program.inputs))


def _values(raw: Any, known: Sequence[Any]) -> Any:
    match raw:
        case Ref(value):
            return known[value]
        case Size(value, dim):
            return known[value].size(dim)
        case Constant(name):
            return getattr(torch, name)
        case tuple():
            return tuple(_values(item, known) for item in raw)
        case list():
            return [_values(item, known) for item in raw]
        case dict():
            return {key: _values(item, known) for key, item in raw.items()}
        case slice():
            return slice(*(_values(part, known) for part in (raw.start, raw.stop, raw.step)))
    return raw
