"""Regions on distributed tensors (DTensor), here with a group of one rank, in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import checked_backend as cb
from tests.support import faults
from tests.support.region_tools import agreed, checked, found, gathered


@pytest.fixture(autouse=True)
def mesh(one_rank: None) -> Any:
    return init_device_mesh("cpu", (1,))


def averaged(x: torch.Tensor, gradient: torch.Tensor) -> None:
    x.lerp_(gradient, 0.1)


def ran(compiled: Callable[..., Any], mesh: Any, steps: int = 3) -> torch.Tensor:
    x, gradient = (distribute_tensor(torch.full((4, 4), value), mesh, [Shard(0)]) for value in (1.0, 2.0))
    with torch.no_grad():
        for _ in range(steps):
            compiled(x, gradient)
    return x.to_local()


def forgetful(gm: torch.fx.GraphModule, _inputs: Sequence[Any]) -> Callable[..., Any]:
    """A compiler that leaves the write out."""
    for node in list(gm.graph.nodes):
        if node.op.startswith("call_"):
            node.replace_all_uses_with(node.args[0])
            gm.graph.erase_node(node)
    gm.recompile()
    return gm.forward


def test_what_is_written_in_place_is_the_same_checked_and_unchecked(mesh: Any) -> None:
    plain = ran(torch.compile(averaged, backend="aot_eager"), mesh)
    torch._dynamo.reset()
    kept: list[torch.Tensor] = []
    report = agreed(gathered(lambda: kept.append(ran(checked(averaged, "aot_eager"), mesh))))
    assert report.coverage.checked["mutated inputs"] == 3
    assert torch.equal(kept[0], plain)


def test_a_write_that_is_left_out_is_found(mesh: Any) -> None:
    report = gathered(lambda: ran(checked(averaged, forgetful), mesh, steps=1))
    assert ("mutation.dropped", "mutated[x]") in found(report)


def test_where_no_operator_is_looked_for_the_finding_says_why(mesh: Any) -> None:
    x = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
    [finding] = gathered(lambda: checked(lambda y: y.sin(), faults.wrong_value(), localize=True)(x)).findings
    assert "distributed tensors" in str(finding.evidence["localized"])


def projected(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.tanh(F.linear(x, weight)).to(torch.bfloat16).to(torch.float32).sum()


def trained_once(mesh: Any, compiler: Any) -> cb.Report:
    torch.manual_seed(0)
    x = distribute_tensor(torch.randn(8, 16), mesh, [Shard(0)])
    weight = distribute_tensor(torch.randn(16, 16), mesh, [Replicate()]).requires_grad_()
    return gathered(lambda: checked(projected, compiler)(x, weight).backward())


def in_another_order(gm: torch.fx.GraphModule, _inputs: Sequence[Any]) -> Callable[..., Any]:
    """A compiler that adds up in two parts, which is as good as eager's way."""
    [node] = [node for node in gm.graph.nodes if "linear" in str(node.target)]
    halves = []
    with gm.graph.inserting_before(node):
        for start in (0, 8):
            parts = tuple(gm.graph.call_method("narrow", (arg, -1, start, 8)) for arg in node.args[:2])
            halves.append(gm.graph.call_function(node.target, parts))
        node.replace_all_uses_with(gm.graph.call_method("add", tuple(halves)))
    gm.graph.erase_node(node)
    gm.recompile()
    return gm.forward


def test_float64_and_the_twin_answer_for_distributed_tensors_too(mesh: Any) -> None:
    report = trained_once(mesh, in_another_order)
    assert report.verdict is cb.Verdict.PASS, str(report)
    assert not report.coverage.skipped
    torch._dynamo.reset()
    report = trained_once(mesh, faults.wrong_operator("aten.tanh_backward.default", how="aot"))
    assert found(report) == {("logic", "grad[weight]")}
    [finding] = report.findings
    assert float(str(finding.evidence["eager_distance"])) < 1e-5
    assert float(str(finding.evidence["candidate_distance"])) > 0.1
    assert float(str(finding.evidence["float64_twin_error"])) > 0.1


def test_what_torch_remembers_of_layouts_is_not_that_of_the_check(mesh: Any) -> None:
    trained_once(mesh, in_another_order)
    low = distribute_tensor(torch.randn(8, 16, dtype=torch.float64), mesh, [Shard(0)]).to(torch.bfloat16)
    assert isinstance(low, DTensor)
    assert (low.dtype, low.to_local().dtype) == (torch.bfloat16, torch.bfloat16)
    assert low._spec.tensor_meta.dtype == torch.bfloat16


def test_a_compiled_optimizer_step_leaves_the_same_parameters(mesh: Any) -> None:
    def trained(compiled: Callable[[Any], Any]) -> torch.Tensor:
        torch._dynamo.reset()
        weight = torch.nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)]))
        step = compiled(torch.optim.AdamW([weight], lr=0.1, foreach=False).step)
        for number in range(2):
            weight.grad = distribute_tensor(torch.full((4, 4), 1.0 + number), mesh, [Shard(0)])
            step()
        return weight.detach().to_local()

    plain = trained(lambda step: torch.compile(step, backend="aot_eager"))
    kept: list[torch.Tensor] = []
    report = gathered(lambda: kept.append(trained(lambda step: checked(step, "aot_eager"))))
    assert report.verdict is cb.Verdict.PASS, str(report)
    assert torch.equal(kept[0], plain)


def test_results_that_eager_has_not_waited_for_are_no_other_type(mesh: Any) -> None:
    x = distribute_tensor(torch.randn(4, 4), mesh, [Shard(0)])
    assert agreed(gathered(lambda: checked(lambda x: (x * 2).full_tensor(), "aot_eager")(x)))


def test_operators_in_half_precision_that_are_not_checked_by_themselves_are_told(mesh: Any) -> None:
    x = distribute_tensor(torch.randn(4, 4, dtype=torch.bfloat16), mesh, [Shard(0)])
    report = gathered(lambda: checked(lambda y: y * 2, "aot_eager")(x))
    assert any("not checked by themselves" in note for note in report.coverage.notes)
