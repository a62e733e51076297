"""A tensor that is not what was traced: the traced metadata tells which operator made it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from torch import fx

from checked_backend.aot.backend import compile_with
from checked_backend.aot.boxed import AotCompiler, boxed
from checked_backend.findings import Finding, Kind
from checked_backend.graphs.schema import is_custom
from checked_backend.metadata.interpreter import MetadataInterpreter
from checked_backend.options import AotOptions
from checked_backend.regions.failure import Failure
from checked_backend.regions.graph_case import rerun_failure

_NAMED = re.compile(r"Error in op: torch\.ops\.(\S+)")
"""The operator whose result is not as traced, in the message of Inductor's ``assert_size_stride`` (guards.cpp)."""


def wrong_metadata(failure: Failure, findings: Sequence[Finding]) -> Finding | None:
    """The operator that a crash names, if its result is really not what was traced; or a custom one of another dtype.

    Compiled code reads wrong values from a tensor of another dtype, or what it calls refuses that.
    The region is traced and run once more, in eager, which takes a second; nothing is compiled.
    """
    failing = [finding for finding in findings if finding.kind.fails]
    crashes = [finding.message for finding in failing if finding.kind is Kind.CRASH]
    named = {op for message in crashes for op in _NAMED.findall(message)}
    dtypes = all("dtype" in message for message in crashes) and any(map(is_custom, failure.graph.graph.nodes))
    if not named and not dtypes:
        return None
    found: list[Finding] = []

    def compiler_for(kind: str) -> AotCompiler:
        return lambda graph, _inputs: boxed(partial(MetadataInterpreter(graph, kind, found.extend)))

    def compiler(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        return compile_with(
            gm,
            inputs,
            options=AotOptions(),
            fw_compiler=compiler_for("forward"),
            bw_compiler=compiler_for("backward"),
            inference_compiler=compiler_for("inference"),
        )

    with suppress(Exception):  # the operator is looked for as usual then
        rerun_failure(failure, compiler)

    def explains(one: Finding) -> bool:
        return one.op in named or (dtypes and one.detail == "structure.dtype" and "custom operator" in one.at_fault)

    return next((one for one in found if one.at_fault and not one.inherited and explains(one)), None)
