"""The generated code of the operator that errs: the kernel that has it, cut out of all code of the region."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from torch import fx

from checked_backend._torch.generated_modules import GeneratedModule, kernel_calls
from checked_backend.errors import CheckedBackendError
from checked_backend.findings import Kernel
from checked_backend.graphs.nodes import origin_of

_MOST_LINES, _MOST_CHARACTERS = 300, 24_000
_MOST_NAMES = 40

_LANGUAGES: Mapping[str, str] = MappingProxyType({"cpp_pybinding": "C++", "cpp": "C++", "triton": "Triton"})
"""What compiles a kernel at run time, and the language of its source. Others are told by their own names."""


def kernel_in(modules: Sequence[GeneratedModule], graph: str, node: str, dynamo: fx.GraphModule) -> Kernel:
    """The kernel that computes a node, of the code of the first graph of that kind.

    Args:
        graph: The kind of the graph; for ``dynamo``, any graph that has nodes made from that one.
        dynamo: Dynamo's graph.

    Raises:
        CheckedBackendError: No code is known, or none of it computes the node.
    """
    if not modules:
        raise CheckedBackendError("the compiler generated none that can be seen")
    for module in modules:
        if graph not in (module.kind, "dynamo"):
            continue
        wanted = {node}
        if graph == "dynamo":
            origins = {one.name: origin_of(one, dynamo) for one in module.graph.graph.nodes}
            wanted = {name for name, origin in origins.items() if origin is not None and origin.name == node}
        calls = [call for call in kernel_calls(module) if not wanted.isdisjoint(call.nodes)]
        names = list(dict.fromkeys(call.name for call in calls))
        for call in calls[:1]:
            source = _definition(module.text, call.name) or ("call", call.statement)
            return _kernel(call.name, *source, call.nodes, [name for name in names if name != call.name])
    raise CheckedBackendError(f"no kernel computes {node}")


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
