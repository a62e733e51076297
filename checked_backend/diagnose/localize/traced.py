"""A crash that says that a tensor is not what was traced: the traced metadata tells which operator made it."""

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
from checked_backend.metadata.interpreter import MetadataInterpreter
from checked_backend.options import AotOptions
from checked_backend.regions.failure import Failure
from checked_backend.regions.rerun import rerun_failure

__all__ = ["wrong_metadata"]

_NAMED = re.compile(r"Error in op: torch\.ops\.(\S+)")
"""The operator whose result is not as traced, in the message of Inductor's ``assert_size_stride`` (guards.cpp)."""


def wrong_metadata(failure: Failure, findings: Sequence[Finding]) -> Finding | None:
    """The operator that a crash names, if its result is really not what was traced.

    The region is traced and run once more, in eager, which takes a second; nothing is compiled.
    """
    failing = [finding for finding in findings if finding.kind.fails]
    named = {op for one in failing if one.kind is Kind.CRASH for op in _NAMED.findall(one.message)}
    if not named:
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
    return next((one for one in found if one.op in named and one.at_fault and not one.inherited), None)
