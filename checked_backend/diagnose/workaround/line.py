"""The user's line outside of the compiler: a compiler that leaves its calls to eager, and code that does so."""

from __future__ import annotations

import ast
import builtins
import operator
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.passes.split_module import split_module

from checked_backend._torch.inductor import EAGERS_KERNEL
from checked_backend.graphs.source_line import source_line
from checked_backend.regions.compile import Compiler, compile_candidate, copy_graph

_BEFORE, _THE_LINE, _BEHIND = 0, 1, 2


def unfused(compiler: Compiler, source: str | None = None) -> Compiler:
    """Have Inductor call eager's kernels for the calls from a line, or for all calls, and compile the rest as ever."""

    def compile_region(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        copied = copy_graph(gm)
        graphs = [module.graph for module in copied.modules() if isinstance(module, fx.GraphModule)]
        calls = [node for graph in graphs for node in graph.nodes if node.op.startswith("call_")]
        chosen = [node for node in calls if source is None or source_line(node) == source]
        if not chosen:
            raise LookupError(f"the region has no call from {source}")
        for node in chosen:
            node.meta["custom"] = {**node.meta.get("custom", {}), EAGERS_KERNEL: True}
        return compiler(copied, example_inputs)

    return compile_region


def keep_unfused(source: str) -> str:
    """Code that does what `unfused` does. Torch's caches do not see the annotation, so they get a key of their own."""
    found = _LINE.match(source)
    place, code = found.groups() if found is not None and _statement(found["code"]) else (source, "...")
    return (
        "import torch\nfrom torch.fx.traceback import annotate\n\n# before the first call of a compiled function\n"
        f"torch.compiler.config.cache_key_tag = {f'{place} left to eager'!r}  # what was compiled is compiled anew\n\n"
        f"# at {place}: eager's kernels, without a graph break\n"
        f"with annotate({{{EAGERS_KERNEL!r}: True}}):\n    {code}"
    )


def without_line(compiler: Compiler, source: str) -> Compiler:
    """Compile the calls before a line and the calls after it, each part by itself."""

    def compile_region(gm: fx.GraphModule, _example_inputs: Sequence[Any]) -> Callable[..., Any]:
        parts = _parts(gm, source)
        if _THE_LINE not in parts.values():
            raise LookupError(f"the region has no call from {source}")
        copied = copy_graph(gm)
        split: Any = split_module(copied, copied, lambda node: parts[node.name], keep_original_order=True)
        for part in (_BEFORE, _BEHIND):
            inner = getattr(split, f"submod_{part}", None)
            if inner is not None:
                inner.forward = _compiled_at_first_call(compiler, inner)
        function: Callable[..., Any] = split.forward
        return function

    return compile_region


def _compiled_at_first_call(compiler: Compiler, part: fx.GraphModule) -> Callable[..., Any]:
    """Compile a part for the inputs of its first call. Compilers expect a graph that returns a tuple."""
    graph = copy_graph(part)
    output = graph.graph.output_node()
    single = not isinstance(output.args[0], (tuple, list))
    if single:
        output.args = ((output.args[0],),)
        graph.recompile()
    made: list[Callable[..., Any]] = []

    def run(*args: Any) -> Any:
        if not made:
            with warnings.catch_warnings():
                # AOT autograd looks at the .grad of the inputs, which are no leaves here
                warnings.simplefilter("ignore")
                made.append(compile_candidate(compiler, graph, list(args)))
        results = made[0](*args)
        return results[0] if single else results

    return run


def _parts(gm: fx.GraphModule, source: str) -> dict[str, int]:
    calls = [node for node in gm.graph.nodes if node.op.startswith("call_")]
    places = [place for place, node in enumerate(calls) if source_line(node) == source]
    first, last = (min(places), max(places)) if places else (len(calls), len(calls))
    parts = {}
    for place, node in enumerate(calls):
        parts[node.name] = _BEFORE if place < first else _THE_LINE if place <= last else _BEHIND
    return parts


def keep_out(op: str, source: str | None) -> str:
    """The last resort: leave the call to eager, at the price of a graph break.

    Args:
        op: The operator (``aten.relu.default``), or the function (``torch.nn.functional.relu``, ``Tensor.add_``).
    """
    steps = op.split(".")
    base = steps[1] if steps[0] in ("aten", "prims") and len(steps) > 1 else steps[-1]
    homes = (("torch", torch), ("torch.nn.functional", torch.nn.functional), ("torch.Tensor", torch.Tensor))
    known = next((f"{home}.{base}" for home, module in homes if hasattr(module, base)), None)
    first = "import torch\n"
    if steps[0] == "operator" and hasattr(operator, base):  # what Python's own signs call
        known, first = f"operator.{base}", "import operator\n\nimport torch\n"
    if known is None and steps[0] in ("aten", "prims"):
        known = f"torch.ops.{op}"
    if known is None:  # no name that a program could call it by
        return keep_line_out(source or "the line that calls it")
    eager = f"eager_{base.strip('_')}"
    where = f"# and call {eager} at {source}" if source else f"# and call {eager} instead"
    return f"{first}\n{eager} = torch.compiler.disable({known})\n{where}"


_LINE = re.compile(r"^(?P<place>[^:]*:\d+ in [^:]+): (?P<code>.*)$")


def keep_line_out(source: str) -> str:
    """The last resort if the line has more than one call, or makes its calls in a backward pass or in a body."""
    found = _LINE.match(source)
    moved = None if found is None else _moved(found["code"])
    if found is None or moved is None:
        return (
            f"import torch\n\n\n# move what stands at {source}\n# into a function of its own, and call that there\n"
            "@torch.compiler.disable\ndef in_eager(*args): ..."
        )
    function, call = moved
    return f"import torch\n\n\n@torch.compiler.disable\n{function}\n\n\n# and at {found['place']}: {call}"


_KNOWN = frozenset({"F", "math", "nn", "np", "torch", "bool", "complex", "float", "int", "str"})
_BUILT_IN = frozenset(dir(builtins))
"""Known where they are called. What is only read, like ``input`` or ``id``, is more often the user's own variable."""


def _statement(code: str) -> ast.stmt | None:
    """A line of code as a statement; None if it is none by itself."""
    try:
        [statement] = ast.parse(code).body
    except (SyntaxError, ValueError):
        return None
    return statement


def _moved(code: str) -> tuple[str, str] | None:
    """A statement as a function of the names it reads, and the call that replaces it; None if it is incomplete."""
    if (statement := _statement(code)) is None:
        return None
    names = [node for node in ast.walk(statement) if isinstance(node, ast.Name)]
    inner = {node.arg for node in ast.walk(statement) if isinstance(node, ast.arg)}
    looped = [part.target for part in ast.walk(statement) if isinstance(part, ast.comprehension)]
    inner |= {node.id for target in looped for node in ast.walk(target) if isinstance(node, ast.Name)}
    stored = dict.fromkeys(node.id for node in names if isinstance(node.ctx, ast.Store) and node.id not in inner)
    called = [node.func for node in ast.walk(statement) if isinstance(node, ast.Call)]
    inner |= {node.id for node in called if isinstance(node, ast.Name) and node.id in _BUILT_IN}
    read = [node.id for node in names if isinstance(node.ctx, ast.Load)]
    if isinstance(statement, ast.AugAssign) and isinstance(statement.target, ast.Name):
        read.append(statement.target.id)
    given = ", ".join(name for name in dict.fromkeys(read) if name not in _KNOWN and name not in inner)
    call = f"in_eager({given})"
    function = f"def {call}:\n    {code}"
    if isinstance(statement, (ast.Return, ast.Expr)):
        return function, call if isinstance(statement, ast.Expr) else f"return {call}"
    if not isinstance(statement, (ast.Assign, ast.AugAssign, ast.AnnAssign)) or not stored:
        return None
    results = ", ".join(stored)
    return f"{function}\n    return {results}", f"{results} = {call}"
