"""The operator check as a whole: its probe is compiled once, and operators that it leaves out are in the coverage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx

import checked_backend as cb
from checked_backend.options import CheckOptions
from checked_backend.regions.compile import inductor_front_compiler
from checked_backend.regions.operator_check import check as operator_check
from tests.support import faults
from tests.support.low_precision import LOW, Block, times, trained
from tests.support.region_tools import agreed, checked, gathered


@pytest.mark.parametrize("rows", [(8, 12, 40)])
def test_region_for_any_size_is_compiled_for_them_once(rows: Sequence[int]) -> None:
    sizes: list[int] = []

    def compiler(gm: fx.GraphModule, given: Sequence[Any]) -> Callable[..., Any]:
        sizes.append(len(given))
        return gm.forward

    weight = torch.randn(16, 8, dtype=torch.bfloat16, requires_grad=True)
    compiled = checked(lambda x: F.silu(x @ weight).exp(), compiler, dynamic=True)

    def run() -> None:
        for count in rows:
            compiled(torch.randn(count, 16, dtype=torch.bfloat16)).sum().backward()

    assert not any("operators" in skip.subject for skip in agreed(gathered(run)).coverage.skipped)
    assert len({size for size in sizes if sizes.count(size) == 1}) >= 1


def test_operators_that_were_not_checked_are_in_the_coverage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operator_check, "LARGEST", 100)
    report = gathered(lambda: checked(lambda x: x.sin() * 2, "eager")(torch.randn(99, dtype=torch.bfloat16)))
    assert report.verdict is cb.Verdict.PASS
    [skip] = report.coverage.skipped
    assert (skip.subject, skip.matters) == ("operators by themselves", False)
    assert "at most 9.3e-08 GiB are returned" in skip.reason


def test_compiler_that_cannot_compile_the_probe_is_checked_without() -> None:
    def compiler(gm: fx.GraphModule, _given: Sequence[Any]) -> Callable[..., Any]:
        if len(gm.graph.find_nodes(op="output")[0].args[0]) > 1:
            raise RuntimeError("no more than one result")
        return gm.forward

    report = gathered(lambda: checked(lambda x: x.sin() * 2, compiler)(torch.randn(99, dtype=torch.bfloat16)))
    assert report.verdict is cb.Verdict.PASS
    assert "RuntimeError: no more than one result" in report.coverage.skipped[0].reason


def test_random_state_and_gradients_are_left_alone() -> None:
    x = torch.randn(64, 32, dtype=torch.bfloat16)
    plain, watched = Block().to(torch.bfloat16), Block().to(torch.bfloat16)
    target, given = torch.randint(0, 10, (48,)), torch.randn(2, 24, 32, dtype=torch.bfloat16)
    states = []
    for model, run in ((plain, torch.compile(plain, backend="aot_eager")), (watched, checked(watched, "aot_eager"))):
        torch.manual_seed(3)
        F.dropout(run(given, target) + 0 * x.sum(), 0.1).backward()
        states.append((torch.get_rng_state(), [parameter.grad for parameter in model.parameters()]))
    assert torch.equal(states[0][0], states[1][0])
    assert all(map(torch.equal, states[0][1], states[1][1]))


def test_before_code_generation_nothing_is_rounded_that_kernels_do_not_round() -> None:
    """The decomposition of layer_norm's gradient divides by a million in float16, which leaves four bits."""
    x = torch.randn(1, 1_000_000).half().requires_grad_()
    weights = torch.randn(1, 1_000_000).half()

    def program(x: torch.Tensor) -> torch.Tensor:
        return (F.layer_norm(x, x.shape[1:]) * weights).sum()

    front = inductor_front_compiler(CheckOptions())
    [found] = torch.autograd.grad(torch.compile(program, backend=lambda gm, given: front(gm, given))(x), x)
    [right] = torch.autograd.grad(program(x), x)
    assert float((found - right).float().square().mean().sqrt()) < 2 * torch.finfo(torch.float16).eps


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
