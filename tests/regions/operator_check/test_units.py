"""The tensors that are checked, with the calls that lead to them, and how these are run."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from checked_backend.regions.operator_check.lane import Lane
from checked_backend.regions.operator_check.units import Units


def chained(x: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    for _ in range(40):
        words = words * (words + 1)
    return x * words.ne(3)


@pytest.mark.parametrize(
    ("program", "jumps"),
    [
        (lambda x, words: x * words.ne(3), False),
        (lambda x, words: torch.where(words[:, None] >= words, x, 0.0), False),
        (chained, False),
        (lambda x, words: x * x.gt(0.5), True),
        (lambda x, words: x * x.argmax(1).eq(words), True),
        (lambda x, words: x * x.topk(4, 1).indices.eq(words), True),
        (lambda x, words: x.round(), True),
    ],
)
def test_a_choice_is_made_of_rounded_values(
    program: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], jumps: bool
) -> None:
    graph = make_fx(program)(torch.randn(4, 4), torch.arange(4)).graph
    result = graph.output_node().all_input_nodes[0]
    assert Units(graph.owning_module, set()).of(result).jumps is jumps


@pytest.mark.parametrize(
    ("program", "steady", "smooth"),
    [
        (lambda x, words: torch.sigmoid(x.float()).bfloat16() + words, True, True),
        (lambda x, words: torch.relu(x) * words, True, False),
        (lambda x, words: x.to(torch.int8) * 0.5, False, False),
        (lambda x, words: x.to(torch.float8_e4m3fn).bfloat16() * 0.5, False, False),
        (lambda x, words: x * words.to(torch.int8), True, True),
        (lambda x, words: x.gt(0) * x, False, False),
    ],
)
def test_a_cast_to_few_values_has_steps(
    program: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], steady: bool, smooth: bool
) -> None:
    graph = make_fx(program)(torch.randn(4, 4).bfloat16(), torch.arange(4)).graph
    unit = Units(graph.owning_module, set()).of(graph.output_node().all_input_nodes[0])
    assert (unit.steady, unit.steady_gradient) == (steady, smooth)


@pytest.mark.parametrize(
    ("program", "overwritten"),
    [
        (lambda x: x * torch.ops.aten.normal_functional(torch.empty_like(x)), True),  # as Normal.rsample draws
        (lambda x: torch.ops.aten.copy(torch.empty_like(x), x), True),
        (lambda x: torch.ops.aten.copy(x, torch.empty_like(x)), False),
        (lambda x: x * torch.ops.aten.bernoulli(torch.empty_like(x)), False),
    ],
)
def test_junk_that_is_overwritten_is_not_read(
    program: Callable[[torch.Tensor], torch.Tensor], overwritten: bool
) -> None:
    graph = make_fx(program, tracing_mode="fake")(torch.randn(4)).graph
    units = Units(graph.owning_module, set())
    (blank,) = filter(units.is_blank, graph.nodes)
    assert units.is_overwritten(blank) is overwritten


aten = torch.ops.aten


def test_attention_is_given_what_its_kernel_can_read() -> None:
    """ATen's kernel reads tensors whose last dimension is not dense wrongly; Inductor lays such inputs out anew."""
    query, key, value, arriving = torch.randn(4, 2, 4, 16, 4).unbind()
    result, logsumexp = aten._scaled_dot_product_flash_attention_for_cpu(query, key, value)
    inputs = [arriving, query, key, value, result, logsumexp]
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    graph = torch.fx.Graph()
    nodes = [graph.placeholder(f"input_{place}") for place in range(len(inputs))]
    made = graph.call_function(backward, (*nodes, 0.0, False))
    lane = Lane(torch.fx.GraphModule({}, graph))
    for node, one in zip(nodes, inputs, strict=True):
        lane.put(node, one.mT.contiguous().mT, gradient=False)
    torch.testing.assert_close(lane.run(made), backward(*inputs, 0.0, False))
