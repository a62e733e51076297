"""Errors of the probe alone say nothing about the region, and hide no error of the region."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

import checked_backend as cb
from checked_backend.regions.operator_check import check as operator_check
from tests.support import faults
from tests.support.low_precision import LOW, times, trained
from tests.support.region_tools import checked, gathered


def test_a_fault_beside_one_of_the_probe_alone_is_found() -> None:
    """What the compiler gets wrong in the probe alone excuses nothing that does not come of it."""

    def compiler(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        [output] = gm.graph.find_nodes(op="output")
        probe = len(output.args[0]) > 2

        def worse(tensor: torch.Tensor) -> torch.Tensor:
            return tensor * (3.0 if probe and tensor.dtype in LOW else 1.0)

        compiled = faults.wrong_operator("aten.sin.default", worse, "eager")(gm, inputs)
        return faults.spoiled_output(times(1.03), 1)(gm, inputs) if not probe else also_wrong(compiled)

    def also_wrong(compiled: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: [
            times(1.03)(value) if place == 1 else value for place, value in enumerate(compiled(*args))
        ]

    def body(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.sin() * 2, x.cos().exp()

    report = gathered(lambda: checked(body, compiler)(torch.randn(40, 50, dtype=torch.bfloat16)))
    assert report.verdict is cb.Verdict.FAIL, str(report)
    assert {finding.subject for finding in report.findings} == {"output[1]"}


def test_an_error_of_the_probe_alone_is_none_of_the_program() -> None:
    """A compiler may fuse, and get wrong, a graph that hands out more: the user does not run that."""

    def wrong_where_much_is_handed_out(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        [output] = gm.graph.find_nodes(op="output")
        if len(output.args[0]) <= 2:
            return gm.forward
        return faults.wrong_operator("aten.gelu.default", times(1.5), "aot")(gm, inputs)

    report = trained(wrong_where_much_is_handed_out, torch.bfloat16)
    assert report.verdict is cb.Verdict.PASS, str(report)
    [reason] = [skip.reason for skip in report.coverage.skipped if skip.subject == operator_check.SUBJECT]
    assert "returning inner tensors makes the compiler produce a different program" in reason
    assert not report.coverage.checked.get("operators")
