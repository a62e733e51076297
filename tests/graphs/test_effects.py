"""Whether a call in a Dynamo graph writes to what it is given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx

from checked_backend.graphs.effects import has_effects


@pytest.mark.parametrize(
    ("function", "given", "writing"),
    [
        (F.dropout, (0.5, True, True), True),  # as `torch.nn.Dropout(inplace=True)` passes it
        (F.dropout, (0.5, True, False), False),
        (F.dropout, (0.5, True), False),
        (F.leaky_relu, (0.1, True), True),
        (F.selu, (True,), True),
        (torch.sum, (0, True), False),
        (torch.relu_, (), True),
    ],
)
def test_functions_that_are_told_to_write_in_place_do(
    function: Callable[..., Any], given: tuple[Any, ...], writing: bool
) -> None:
    graph = fx.Graph()
    node = graph.call_function(function, (graph.placeholder("x"), *given))
    assert has_effects(node) is writing
