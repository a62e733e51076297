"""How an operator of a lowered graph is run on the compiled program's own values."""

from __future__ import annotations

import torch

from checked_backend.regions.operator_check.lane import Lane

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
