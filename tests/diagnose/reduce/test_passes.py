"""Each pass on a program that stays wrong as long as one thing is there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from checked_backend.diagnose.reduce.failing_case import FailingCase
from checked_backend.diagnose.reduce.passes.details import (
    common_dtypes,
    drop_optional_tensors,
    round_arguments,
    simplify_values,
)
from checked_backend.diagnose.reduce.passes.graph import (
    bypass_calls,
    drop_outputs,
    each_alone,
    earlier_output,
    merge_inputs,
    recorded_calls,
)
from checked_backend.diagnose.reduce.passes.shapes import drop_dimensions, resized, shrink_sizes
from checked_backend.diagnose.reduce.problem import Problem
from checked_backend.options import CheckOptions
from checked_backend.regions.graph_case import GraphCase
from checked_backend.scripts.values import form_of
from tests.support.reduce_tools import count, problem_where, program_of, targets

aten = torch.ops.aten


def calls(name: str) -> Callable[[GraphCase], bool]:
    return lambda case: name in targets(case)


def run(which: Callable[[Problem], None], wrong: Callable[[GraphCase], bool], function: Any, *inputs: Any) -> GraphCase:
    problem = problem_where(wrong, program_of(function, *inputs))
    which(problem)
    assert wrong(problem.best.case)
    assert len(problem.best.case.graph(*problem.best.case.inputs)) >= 1
    return problem.best.case


def long_chain(x: Tensor) -> tuple[Tensor, ...]:
    for _ in range(6):
        x = aten.add.Tensor(x, 1)
    x = aten.relu.default(x)
    for _ in range(6):
        x = aten.mul.Tensor(x, 2)
    return (x,)


def test_calls_that_do_not_matter_are_recorded_or_left_out() -> None:
    recorded = run(recorded_calls, calls("aten.relu.default"), long_chain, torch.ones(3))
    assert targets(recorded) == ["aten.relu.default", *["aten.mul.Tensor"] * 6]  # what the output needs cannot be
    assert torch.equal(recorded.inputs[0], torch.full((3,), 7.0))  # 1 + 6
    assert targets(run(bypass_calls, calls("aten.relu.default"), long_chain, torch.randn(3))) == ["aten.relu.default"]


def test_a_call_that_is_wrong_on_its_own_is_found_at_once() -> None:
    tried: list[GraphCase] = []

    def wrong(case: GraphCase) -> bool:
        tried.append(case)
        return "aten.relu.default" in targets(case)

    assert targets(run(each_alone, wrong, long_chain, torch.randn(3))) == ["aten.relu.default"]
    assert sorted(targets(tried[0])) == sorted(targets(program_of(long_chain, torch.randn(3)).case))


def test_the_output_moves_to_where_it_is_wrong_first() -> None:
    left = run(earlier_output, calls("aten.relu.default"), long_chain, torch.randn(3))
    assert targets(left)[-1] == "aten.relu.default"


def test_outputs_are_dropped_and_the_tracked_one_stays_tracked() -> None:
    def three(x: Tensor) -> tuple[Tensor, ...]:
        return aten.exp.default(x), aten.relu.default(x), aten.neg.default(x)

    program = replace(program_of(three, torch.randn(3)), subject="output[1]")
    problem = problem_where(calls("aten.relu.default"), program)
    drop_outputs(problem)
    assert targets(problem.best.case) == ["aten.relu.default"]
    assert problem.best.subject == "output[0]"


def test_inputs_are_merged_and_optional_ones_left_out() -> None:
    def normed(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor]:
        return (aten.native_layer_norm.default(aten.add.Tensor(x, y), [4], weight, bias, 1e-5)[0],)

    inputs = (torch.randn(2, 4), torch.randn(2, 4), torch.randn(4), torch.randn(4))
    assert len(run(merge_inputs, calls("aten.add.Tensor"), normed, *inputs).inputs) == 2
    assert len(run(drop_optional_tensors, calls("aten.native_layer_norm.default"), normed, *inputs).inputs) == 2


def attention_like(x: Tensor, mask: Tensor) -> tuple[Tensor]:
    flat = aten.view.default(x, [32, 48])
    heads = aten.view.default(aten.mul.Tensor(flat, 2), [4, 8, 6, 8])
    turned = aten.clone.default(aten.permute.default(heads, [0, 2, 1, 3]), memory_format=torch.contiguous_format)
    return (aten.add.Tensor(aten.view.default(turned, [4, 6, 64]), aten.expand.default(mask, [4, 6, 64])),)


def test_sizes_shrink_and_arguments_follow() -> None:
    inputs = (torch.randn(4, 8, 48), torch.randn(4, 1, 64))
    assert count(run(shrink_sizes, calls("aten.permute.default"), attention_like, *inputs)) <= 4
    smaller = resized(program_of(attention_like, *inputs), {4: 2})
    assert smaller.case.graph(*smaller.case.inputs)[0].shape == (2, 6, 64)


def test_sizes_that_depend_on_each_other_shrink_together() -> None:
    def pooled(gradient: Tensor, x: Tensor) -> tuple[Tensor]:
        return (aten.avg_pool2d_backward.default(gradient, x, [3, 3], [2, 2], [0, 0], True, True, None),)

    inputs = torch.ones(1, 1, 4, 4), torch.ones(1, 1, 8, 8)
    assert count(run(shrink_sizes, calls("aten.avg_pool2d_backward.default"), pooled, *inputs)) <= 5


def test_indices_stay_in_bounds() -> None:
    def looked_up(weight: Tensor, at: Tensor) -> tuple[Tensor]:
        return (aten.embedding.default(weight, at),)

    inputs = torch.randn(50, 24), torch.tensor([[49, 3, 7], [48, 0, 9]])
    assert count(run(shrink_sizes, calls("aten.embedding.default"), looked_up, *inputs)) <= 4


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (lambda x: True, "torch.zeros(2, 3)"),
        (lambda x: bool((x != 0).all()), "torch.ones(2, 3)"),
        (lambda x: len(set(x.reshape(-1).tolist())) == 6, "torch.arange(6, dtype=torch.float32).reshape(2, 3)"),
    ],
)
def test_values_become_simple(wrong: Callable[[Tensor], bool], text: str) -> None:
    left = run(simplify_values, lambda case: wrong(case.inputs[0]), lambda x: (aten.exp.default(x),), torch.randn(2, 3))
    assert form_of(left.inputs[0]).text == text


def test_values_on_which_eager_gives_zeros_alone_prove_little() -> None:
    left = run(simplify_values, lambda _case: True, lambda x: (aten.relu.default(x),), torch.randn(2, 3))
    assert form_of(left.inputs[0]).text == "torch.ones(2, 3)"


def test_dtypes_and_arguments_become_common() -> None:
    def cast(x: Tensor) -> tuple[Tensor]:
        return (aten.mul.Tensor(aten._to_copy.default(x, dtype=torch.float16), 0.1234),)

    left = run(common_dtypes, calls("aten.mul.Tensor"), cast, torch.randn(3, dtype=torch.bfloat16))
    assert left.graph(*left.inputs)[0].dtype is torch.float32
    left = run(round_arguments, calls("aten.mul.Tensor"), cast, torch.randn(3))
    assert torch.allclose(left.graph(*left.inputs)[0], left.inputs[0].half())


def test_dimensions_of_size_one_go() -> None:
    left = run(drop_dimensions, calls("aten.relu.default"), lambda x: (aten.relu.default(x),), torch.randn(1, 1, 3))
    assert left.inputs[0].shape == (3,)


def test_a_layout_that_matters_stays() -> None:
    x = torch.randn(3, 4).t()
    left = run(simplify_values, lambda case: not case.inputs[0].is_contiguous(), lambda x: (aten.relu.default(x),), x)
    assert left.inputs[0].stride() == (1, 4)
    assert form_of(left.inputs[0].contiguous()).text == "torch.ones(4, 3)"


def test_a_call_for_its_effect_alone_does_not_hang_a_pass() -> None:
    def program(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        aten.copy_.default(x, aten.relu.default(y))
        return (aten.neg.default(aten.exp.default(y)),)

    left = run(recorded_calls, calls("aten.copy_.default"), program, torch.ones(3), torch.ones(3))
    assert "aten.relu.default" not in targets(left)


def test_statements_of_a_dynamo_graph_stay() -> None:
    def program(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        z = torch.relu(x)
        z.mul_(y)
        return torch.neg(z), torch.exp(y)

    left = run(drop_outputs, lambda _case: True, program, torch.ones(3), torch.ones(3))
    made = [node.target for node in left.graph.graph.nodes if node.op.startswith("call_")]
    assert [getattr(target, "__name__", target) for target in made] == ["relu", "mul_", "neg"]


def test_the_output_does_not_move_to_a_tuple() -> None:
    def program(x: Tensor) -> tuple[Tensor, ...]:
        values, _ = aten.max.dim(x, 1)
        return (aten.neg.default(values),)

    gm = fx.GraphModule(torch.nn.Module(), make_fx(program)(torch.ones(2, 3)).graph)
    start = FailingCase.of(GraphCase(gm, (torch.ones(2, 3),), CheckOptions(compiler="eager")), "output[0]")
    problem = problem_where(calls("aten.max.dim"), start)
    earlier_output(problem)
    [result] = problem.best.case.graph(torch.ones(2, 3))
    assert isinstance(result, Tensor)
    assert "aten.neg.default" not in targets(problem.best.case)
