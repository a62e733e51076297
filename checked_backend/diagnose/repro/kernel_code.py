"""The code that Inductor generates for a small program, for a script that runs it without the compiler."""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Iterator

import torch

from checked_backend._torch.caches import without_compile_caches
from checked_backend._torch.generated_modules import GeneratedModule, generated_modules_noted, kernel_calls
from checked_backend.errors import CheckedBackendError
from checked_backend.graphs.mode_blocks import with_mode_blocks
from checked_backend.process.worker import cannot_fork, run_in_worker
from checked_backend.regions.compile import copy_graph, resolve_compiler
from checked_backend.regions.graph_case import GraphCase
from checked_backend.regions.inputs import copy_values
from checked_backend.regions.operator_check.recorder import recorded


def kernel_code(case: GraphCase, timeout: float) -> list[str]:
    """The lines that define ``compiled`` as a call of the one kernel of a small program, with the kernel's source.

    Returns:
        The lines; none if the program is not one kernel whose call takes the program's inputs and gives its results.
    """
    if case.options.compiler != "inductor" or case.cotangents is not None or cannot_fork():
        return []
    try:
        answer = run_in_worker(lambda: json.dumps(_generated(case)), timeout=timeout)
    except CheckedBackendError:  # as in a compiler that is wrong in another way
        return []
    return list(json.loads(answer)) if isinstance(answer, str) else []


@torch.no_grad()
def _generated(case: GraphCase) -> list[str]:
    modules: list[GeneratedModule] = []
    compiler = resolve_compiler(case.options)
    graph = with_mode_blocks(copy_graph(case.graph))
    with without_compile_caches(), generated_modules_noted(modules):
        compiled = torch.compile(graph, backend=compiler, dynamic=case.dynamic, fullgraph=True)
        compiled(*copy_values(case.inputs))
    if len(modules) != 1 or not _is_one_kernel(modules[0]):
        return []
    inputs = copy_values(case.inputs)
    with recorded(modules, math.inf) as [(_, recording)]:
        results = compiled(*inputs)
    places = [
        next((place for place, one in enumerate(inputs) if one is given), None) for given in recording.arguments or ()
    ]
    if None in places or not _are_same(recording.results, results):
        return []
    given = ", ".join(f"inputs[{place}]" for place in places)
    whole = f"call([{given}])"
    return [
        "",
        "",
        "# what Inductor generated for it",
        *_definitions(modules[0].text),
        "",
        "",
        "def compiled(*inputs):",
        f"    return {f'{whole}[0]' if len(results) == 1 else f'tuple({whole})'}",
        "",
        "",
    ]


def _is_one_kernel(module: GeneratedModule) -> bool:
    names = re.findall(r"^(\w+) = async_compile\.", module.text, re.MULTILINE)
    return len(names) == 1 and [call.name for call in kernel_calls(module)] == names


def _are_same(made: object, results: object) -> bool:
    """Whether the results of the generated code are the program's, in their order."""
    if not isinstance(made, list) or not isinstance(results, (tuple, list)) or len(made) != len(results):
        return False
    pairs = [pair for pair in zip(made, results, strict=True) if all(isinstance(one, torch.Tensor) for one in pair)]
    return len(pairs) == len(results) and all(
        one.dtype == other.dtype and torch.equal(one.nan_to_num(), other.nan_to_num()) for one, other in pairs
    )


def _definitions(text: str) -> list[str]:
    """The statements of generated code that its function ``call`` needs."""
    lines = text.splitlines()
    needed: list[list[str]] = []
    wanted = {"call"}
    for node in reversed(ast.parse(text).body):
        if isinstance(node, ast.Expr) or not wanted.isdisjoint(_bound(node)):
            needed.insert(0, lines[node.lineno - 1 : node.end_lineno])
            wanted |= {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}
    return [line for statement in needed for line in statement]


def _bound(node: ast.stmt) -> Iterator[str]:
    """The names that a statement gives a meaning."""
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        yield from ((alias.asname or alias.name).partition(".")[0] for alias in node.names)
    elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        yield node.name
    elif isinstance(node, ast.Assign):
        yield from (target.id for target in node.targets if isinstance(target, ast.Name))
