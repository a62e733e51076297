"""Run a program under a compiler that is wrong, and locate its first failure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from checked_backend.diagnose.localize.locate import Location, locate
from checked_backend.diagnose.localize.subgraph import called_name
from checked_backend.findings import Finding
from checked_backend.options import CheckOptions
from checked_backend.regions.build import build_region
from checked_backend.regions.failure import Failure
from checked_backend.regions.graph_case import GraphCase
from tests.support.region_tools import checked, gathered


def oracle(case: GraphCase) -> Sequence[Finding]:
    """Tries a case in this process: these compilers are Python."""
    return [finding for finding in case.findings() if finding.kind.fails]


def located(
    program: Callable[[Callable[..., Any]], Any],
    function: Callable[..., Any],
    compiler: Any,
    known: Callable[[Location], None] = lambda _location: None,
    tries: Callable[[GraphCase], Sequence[Finding]] = oracle,
    **more: Any,
) -> Location:
    """Run a program with a compiler that is wrong, and locate the first failure."""
    found: list[Location] = []

    def investigator(failure: Failure, findings: Sequence[Finding]) -> Sequence[Finding]:
        before = torch.get_rng_state(), torch.is_grad_enabled()
        found.append(locate(failure, findings, tries, known=known, **more))
        assert torch.equal(torch.get_rng_state(), before[0])
        assert torch.is_grad_enabled() == before[1]
        return findings

    def backend(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        options = CheckOptions(compiler=compiler, on_divergence="record", layout="raise")
        return build_region(gm, example_inputs, options, None, silent=True, investigator=investigator)

    program(torch.compile(function, backend=backend))
    [location] = found
    return location


def failed(
    monkeypatch: pytest.MonkeyPatch, function: Callable[..., Any], compiler: Any, *args: Any, **kwargs: Any
) -> tuple[Failure, Sequence[Finding]]:
    """What is to be investigated of a call with a compiler that is wrong."""
    calls: list[tuple[Failure, Sequence[Finding]]] = []

    def note(failure: Failure, findings: Sequence[Finding]) -> Sequence[Finding]:
        calls.append((failure, findings))
        return findings

    monkeypatch.setattr("checked_backend.backends.investigate", note)
    gathered(lambda: checked(function, compiler, localize=True)(*args, **kwargs))
    return calls[0]


def traced(function: Callable[..., Any], *inputs: Any) -> torch.fx.GraphModule:
    return make_fx(function, tracing_mode="fake")(*inputs)


def inference(compiled: Callable[..., Any]) -> None:
    with torch.no_grad():
        compiled(torch.randn(5, 6))


def training(compiled: Callable[..., Any]) -> None:
    compiled(torch.randn(5, 6)).square().sum().backward()


def operator_of(location: Location) -> str | None:
    return None if location.node is None else called_name(location.node)


def calls(case: GraphCase) -> list[str]:
    return [str(node.target) for node in case.graph.graph.nodes if node.op.startswith("call_")]
