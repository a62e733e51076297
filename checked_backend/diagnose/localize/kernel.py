"""The generated code of the operator that errs: the kernel that has it, cut out of all code of the region."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from types import MappingProxyType

from checked_backend._torch.output_code import CALL_MARK, OutputCode, output_code_noted
from checked_backend.errors import CheckedBackendError
from checked_backend.findings import Kernel
from checked_backend.process.worker import Death, cannot_fork, run_in_worker
from checked_backend.regions.failure import Failure
from checked_backend.regions.rerun import compile_again

__all__ = ["KERNEL_LIMIT", "generated_kernel", "kernel_in", "kernel_of_json"]

KERNEL_LIMIT = 60.0
"""Seconds after which the compiler counts as hung."""

_MOST_LINES, _MOST_CHARACTERS = 300, 24_000
_MOST_NAMES = 40
_LONGEST_CALL = 20  # lines

_LANGUAGES: Mapping[str, str] = MappingProxyType({"cpp_pybinding": "C++", "cpp": "C++", "triton": "Triton"})
"""What compiles a kernel at run time, and the language of its source. Others are told by their own names."""


def generated_kernel(failure: Failure, graph: str, node: str) -> Kernel:
    """Compile a failed region once more, in a worker process if one can be forked, and take the kernel of an operator.

    Args:
        failure: The failed call; its candidate is Inductor.
        graph: The graph that has the operator: ``forward``, ``backward``, ``inference`` or ``dynamo``.

    Raises:
        CheckedBackendError: The compiler died or hung, or its code does not say what computes the operator.
    """

    def produce() -> str:
        found: list[OutputCode] = []
        with output_code_noted(found):
            compile_again(failure)
        return json.dumps(asdict(kernel_in(found, graph, node)))

    answer = produce() if cannot_fork() else run_in_worker(produce, timeout=KERNEL_LIMIT)
    if isinstance(answer, Death):
        raise CheckedBackendError(f"the process that compiled it again died: {answer.words}")
    return kernel_of_json(json.loads(answer))


def kernel_of_json(members: Mapping[str, object]) -> Kernel:
    """A kernel of the members that `asdict` gave, after JSON."""
    lists = {name: tuple(value) for name, value in members.items() if isinstance(value, list)}
    return Kernel(**{**members, **lists})  # type: ignore[arg-type]


def kernel_in(codes: Sequence[OutputCode], graph: str, node: str) -> Kernel:
    """The kernel that computes a node, of the code of the first graph of that kind.

    Args:
        graph: The kind of the graph; for ``dynamo``, any graph that has nodes made from that one.

    Raises:
        CheckedBackendError: No code is known, or none of it says that it computes the node.
    """
    if not codes:
        raise CheckedBackendError("the compiler generated none when the region was compiled again")
    for code in codes:
        if graph not in (code.kind, "dynamo"):
            continue
        wanted = {node} if graph != "dynamo" else {name for name, origin in code.origins.items() if origin == node}
        calls = [call for call, nodes in code.computed.items() if not wanted.isdisjoint(nodes)]
        names = list(dict.fromkeys(_name(call) for call in calls))
        for call in calls:
            source = _definition(code.text, _name(call)) or _call(code.text, call)
            if source is not None:
                others = tuple(name for name in names if name != _name(call))
                return _kernel(_name(call), *source, code.computed[call], others)
    raise CheckedBackendError(f"no kernel says that it computes {node}")


def _name(call: str) -> str:
    return call.rpartition(":")[0]


def _kernel(name: str, language: str, source: str, computes: Sequence[str], others: Sequence[str]) -> Kernel:
    lines = source.strip("\n").splitlines()
    kept = lines[:_MOST_LINES]
    while sum(map(len, kept)) + len(kept) > _MOST_CHARACTERS and len(kept) > 1:
        kept.pop()
    code = "\n".join(kept)[:_MOST_CHARACTERS]
    return Kernel(
        name, language, code, len(lines) - len(kept), tuple(computes[:_MOST_NAMES]), tuple(others[:_MOST_NAMES])
    )


def _definition(text: str, name: str) -> tuple[str, str] | None:
    """A kernel's language and source, which the module has as a string."""
    found = re.search(rf"^{re.escape(name)} = async_compile\.(\w+)\(.*?r?'''(.*?)^'''", text, re.MULTILINE | re.DOTALL)
    return None if found is None else (_LANGUAGES.get(found[1], found[1]), found[2])


def _call(text: str, call: str) -> tuple[str, str] | None:
    """The statement that calls a library function, after the comment that names the call."""
    _, mark, rest = text.partition(f"{CALL_MARK} {call}\n")
    statement = "\n".join(_statement(rest))
    return ("call", statement) if mark and statement else None


def _statement(text: str) -> Iterator[str]:
    """The lines up to the one that closes the first one's parentheses."""
    depth = 0
    for line in text.splitlines()[:_LONGEST_CALL]:
        if depth == 0 and line.lstrip().startswith("#"):
            continue
        yield line.strip()
        depth += line.count("(") - line.count(")")
        if depth <= 0:
            return
