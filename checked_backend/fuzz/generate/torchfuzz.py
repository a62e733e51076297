"""Programs of torchfuzz, the fuzzer in PyTorch's tree, as programs of this package.

torchfuzz writes Python. Its function is run once in eager and captured by Dynamo here, in the process that generates;
what is kept are the calls, as data. So its programs are checked, made small, grouped and stored like all others, and
no text of a database is ever run. The checkout's own code is run: trust it.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import random
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

from checked_backend.errors import CheckedBackendError, FuzzError
from checked_backend.fuzz.build import argument_of, dtype_name, run_eager
from checked_backend.fuzz.generate.defined import run_defined_call, runs_alike
from checked_backend.fuzz.generate.draft import Choices
from checked_backend.fuzz.generate.make import matches
from checked_backend.fuzz.known import is_known, name_of
from checked_backend.fuzz.program import (
    DTYPES,
    FuzzProgram,
    Input,
    Ref,
    Statement,
    decode_program,
    encode_program,
)
from checked_backend.random_state import random_untouched

_PACKAGE = "torchfuzz"
_PLACES = ("", _PACKAGE, f"tools/experimental/{_PACKAGE}", f"tools/experimental/dynamic_shapes/{_PACKAGE}")
_FILES = ("codegen.py", "ops_fuzzer.py")
_FUNCTION, _ARGUMENTS = "fuzzed_program", "args"
_SEEDS = 2**20
_INTEGERS = {"low": 5.0, "high": 29.0}
_DYNAMIC = "dynamic=True"


class LeftOut(CheckedBackendError):
    """Raised for a program of torchfuzz that cannot be one of this package; the message says why."""


def find_torchfuzz(folder: Path) -> Path:
    """The package in a checkout of PyTorch, or in its folder, or that folder; a FuzzError if it is not there."""
    for place in _PLACES:
        found = (folder / place).resolve()
        if found.name == _PACKAGE and all((found / file).is_file() for file in _FILES):
            return found
    raise FuzzError(
        f"--generator torchfuzz:{folder}: no torchfuzz in it; expected a checkout of PyTorch with"
        f" {_PLACES[2]}/{_FILES[0]}, or that folder"
    )


class TorchFuzz:
    """torchfuzz of a checkout, imported from there; a FuzzError is raised if that cannot be."""

    def __init__(self, folder: Path, choices: Choices) -> None:
        package = find_torchfuzz(folder)
        sys.path.insert(0, str(package.parent))
        try:
            self._codegen = importlib.import_module(f"{_PACKAGE}.codegen")
            self._ops_fuzzer = importlib.import_module(f"{_PACKAGE}.ops_fuzzer")
        except Exception as error:  # the user's code may raise anything
            raise FuzzError(f"{package} cannot be imported: {type(error).__name__}: {error}") from error
        self._choices = choices

    def program(self, seed: int, number: int) -> FuzzProgram:
        """The program of a seed and a number. With seed 0 it is that of ``fuzzer.py --seed NUMBER``.

        Raises:
            LeftOut: torchfuzz made none, or one that this package has no words for, or that torch leaves undefined.
        """
        with random_untouched(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                text = self.text(seed * _SEEDS + number)
                graph, given = _captured(text)
            except LeftOut:
                raise
            except Exception as error:  # torchfuzz, eager or Dynamo refuses
                raise LeftOut(f"{type(error).__name__}") from error
            program = self._as_asked(_converted(graph, given), text)
            _refuse_undefined(program)
        return decode_program(encode_program(program))

    def text(self, seed: int) -> str:
        """The program as torchfuzz writes it, made as its ``fuzz_and_execute`` makes it."""
        random.seed(seed + 999)
        depth = random.randint(2, 4)
        random.seed(seed)
        torch.manual_seed(seed)
        spec = self._ops_fuzzer.fuzz_spec("default")
        graph = self._ops_fuzzer.fuzz_operation_graph(spec, max_depth=depth, seed=seed, template="default")
        return str(self._codegen.convert_graph_to_python_code(graph, seed=seed, template="default"))

    def _as_asked(self, program: FuzzProgram, text: str) -> FuzzProgram:
        choices = self._choices
        if choices.ops and not any(matches(op, choices.ops) for op in program.ops):
            raise LeftOut("none of the operations of --ops")
        dynamic = _DYNAMIC in text if choices.dynamic is None else choices.dynamic
        if choices.training is False:
            inputs = tuple(replace(given, requires_grad=False) for given in program.inputs)
            return replace(program, inputs=inputs, gradients=False, dynamic=dynamic)
        inputs = tuple(
            replace(given, requires_grad=True) if given.dtype.startswith(("float", "bfloat", "complex")) else given
            for given in program.inputs
        )
        return replace(program, inputs=inputs, gradients=True, dynamic=dynamic)


def _captured(text: str) -> tuple[fx.GraphModule, list[torch.Tensor]]:
    """The graph of a text's function, and the inputs that the graph takes. What the text compiles itself is not run."""
    # Dynamo of torch 2.11 imports the function's module, and remembers it by its name.
    module = ModuleType(f"{_FUNCTION}_{hashlib.sha256(text.encode()).hexdigest()[:16]}")
    names = vars(module)
    kept = ast.Module([node for node in ast.parse(text).body if _is_needed(node)], [])
    exec(compile(kept, f"<{_PACKAGE}>", "exec"), names)  # noqa: S102  made just now by the user's own checkout
    graphs: list[tuple[fx.GraphModule, list[Any]]] = []

    def keep(graph: fx.GraphModule, given: list[Any]) -> Callable[..., Any]:
        graphs.append((graph, given))
        return graph.forward

    sys.modules[module.__name__] = module
    with torch.enable_grad():
        try:
            compiled: Any = torch.compile(names[_FUNCTION], backend=keep, fullgraph=True, dynamic=False)
            compiled(*names[_ARGUMENTS])
        finally:
            sys.modules.pop(module.__name__, None)
            torch.compiler.reset()
    if len(graphs) != 1:
        raise LeftOut(f"{len(graphs)} graphs")
    return graphs[0]


def _is_needed(node: ast.stmt) -> bool:
    """Whether a statement makes the function or its arguments: not flags of torch, nor what runs the program."""
    match node:
        case ast.Import() | ast.ImportFrom():
            return True
        case ast.FunctionDef(name=name):
            return name == _FUNCTION
        case ast.Assign(targets=[ast.Name(id=name)]):
            return name == _ARGUMENTS or name == "sentinel" or name.startswith("arg_")
        case ast.Expr(value=ast.Call(func=ast.Attribute(attr="manual_seed"))):
            return True
    return False


def _converted(graph: fx.GraphModule, given: Sequence[Any]) -> FuzzProgram:
    """A graph of Dynamo as a program of the same calls. Inputs keep dtype and layout; their values are ours."""
    values: dict[fx.Node, Ref] = {}
    inputs: list[Input] = []
    calls: list[Statement] = []
    returns: tuple[int, ...] = ()
    tensors = iter(given)
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            inputs.append(_input(next(tensors), len(inputs)))
            values[node] = Ref(len(inputs) - 1)
        elif node.op == "output":
            returns = tuple(values[value].value for value in node.all_input_nodes)
        else:
            calls.append(_statement(node, values))
            values[node] = Ref(len(inputs) + len(calls) - 1)
    if not calls or not returns:
        raise LeftOut("nothing is computed")
    return FuzzProgram(tuple(inputs), tuple(calls), returns).unused_dropped()


def _input(tensor: Any, seed: int) -> Input:
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
        raise LeftOut(f"an input that is a {type(tensor).__name__}")
    dtype = dtype_name(tensor)
    if dtype not in DTYPES:
        raise LeftOut(f"an input of {dtype}")
    whole: Mapping[str, Any] = {"fill": "range", **_INTEGERS} if "int" in dtype else {}
    place = tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset())
    return Input(dtype, *place, seed=seed, requires_grad=tensor.requires_grad, **whole)


def _statement(node: fx.Node, values: Mapping[fx.Node, Ref]) -> Statement:
    name = f"Tensor.{node.target}" if node.op == "call_method" else name_of(node.target)
    if name is None or node.op not in ("call_method", "call_function") or not is_known(name):
        raise LeftOut(f"{getattr(node.target, '__name__', node.target)}, which no program may call")
    kwargs = {key: value for key, value in node.kwargs.items() if key != "device" or str(value) != "cpu"}
    args, kwargs = map_aggregate((tuple(node.args), kwargs), lambda leaf: _leaf(leaf, values))
    return Statement(name, args, kwargs)


def _leaf(raw: Any, values: Mapping[fx.Node, Ref]) -> Any:
    """A part of an argument that has no parts."""
    if isinstance(raw, fx.Node):
        return values[raw]
    try:
        return argument_of(raw)
    except TypeError as error:
        raise LeftOut(f"an argument that is a {error}") from None


def _refuse_undefined(program: FuzzProgram) -> None:
    """Leave out what torch leaves undefined, what eager refuses with values of ours, and what it does not repeat."""

    def run(call: Statement, known: Sequence[Any]) -> Any:
        try:
            return run_defined_call(call, known, gradients=program.gradients)
        except FuzzError as error:
            raise LeftOut(f"{call.op}, whose result torch leaves open here") from error
        except Exception as error:
            raise LeftOut(f"{call.op}: {type(error).__name__}") from error

    run_eager(program, run)
    if not runs_alike(program):
        raise LeftOut("eager does not repeat it, or cannot differentiate it")
