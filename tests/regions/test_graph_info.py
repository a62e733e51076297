"""A region's inputs have names that a person knows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from checked_backend.graphs.lift import lift_written_attributes
from checked_backend.regions.graph_info import GraphInfo


def test_the_state_of_an_optimizer_is_named_by_places() -> None:
    """Dynamo has the text of a key that is no number and no string by its place among the keys."""
    names: list[str] = []

    def noting(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> torch.fx.GraphModule:
        lifted, _, _ = lift_written_attributes(gm, inputs)
        names.extend(GraphInfo.of(lifted).inputs)
        return gm

    parameters = [torch.nn.Parameter(torch.randn(4)) for _ in range(2)]
    step = torch.compile(torch.optim.AdamW(parameters).step, backend=noting)
    for _ in range(2):
        for parameter in parameters:
            parameter.grad = torch.randn(4)
        step()
    assert {"self.param_groups[0][params][1].grad", "self.state[0][1]"} <= set(names)
    assert not [name for name in names if "keys" in name]
