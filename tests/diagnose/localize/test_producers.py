"""An operator whose wrong values show only in what is compiled with it is named, and not what shows them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support import faults
from tests.support.locate_tools import inference, located, training


class Net(nn.Module):
    """More than twenty nodes around a piece of integer arithmetic."""

    def __init__(self, piece: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 12), nn.Linear(12, 3)
        self.norm = nn.LayerNorm(12)
        self.piece = piece

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.nn.functional.gelu(self.first(x)) * 2
        hidden = self.norm(hidden) + torch.tanh(hidden)
        hidden = hidden + self.piece(hidden)
        hidden = torch.sigmoid(hidden) * hidden.cos()
        hidden = hidden - hidden.mean(1, keepdim=True)
        return self.last(torch.nn.functional.relu(hidden)).softmax(-1)


def positions(x: Tensor) -> Tensor:
    return (x.new_zeros(12, dtype=torch.int64) + torch.arange(12) * 3).to(x.dtype) * 0.1


def bytes_(x: Tensor) -> Tensor:
    small = (x * 10).clamp(0, 200).to(torch.uint8)
    return (small * 2 + 1).to(x.dtype) * 0.01


def booleans(x: Tensor) -> Tensor:
    return ((x > 0) & (x < 0.5)).to(x.dtype)


def floors(x: Tensor) -> Tensor:
    whole = (x * 100).to(torch.int32)
    return (torch.div(whole, 7, rounding_mode="floor") * 2).to(x.dtype) * 0.01


def looked_up(x: Tensor) -> Tensor:
    place = torch.remainder((x * 10).to(torch.int64), 12)
    return x.gather(1, place)


def one_further(value: Tensor) -> Tensor:
    """Another index that exists."""
    return (value + 1) % 12


@pytest.mark.process
@pytest.mark.parametrize(
    ("piece", "operator", "spoil", "program"),
    [
        (positions, "aten.mul.Tensor", lambda value: value + 1 if value.dtype is torch.int64 else value, inference),
        pytest.param(
            bytes_,
            "aten.mul.Tensor",
            lambda value: value + 1 if value.dtype is torch.uint8 else value,
            training,
            marks=pytest.mark.slow,
        ),
        pytest.param(booleans, "aten.bitwise_and.Tensor", torch.logical_not, inference, marks=pytest.mark.slow),
        (floors, "aten.div.Tensor_mode", lambda value: value + 1, training),
        pytest.param(looked_up, "aten.remainder.Scalar", one_further, inference, marks=pytest.mark.slow),
    ],
)
def test_an_integer_operator_that_only_its_readers_show_is_named(
    piece: Callable[[Tensor], Tensor], operator: str, spoil: Callable[[Tensor], Tensor], program: Callable[..., Any]
) -> None:
    location = located(program, Net(piece), faults.wrong_for_readers(operator, spoil))
    assert location.op == operator
    assert location.node is not None
    assert location.cut is not None
    assert any("shows it and is right by itself" in note for note in location.notes)


@pytest.mark.process
def test_a_reader_that_is_wrong_is_named_and_not_what_it_reads() -> None:
    """Wrong only where it is fused with what computes its input; that is right for other readers."""

    def floors_then_sine(x: Tensor) -> Tensor:
        return torch.sin((x * 100).to(torch.int32) // 7)

    location = located(inference, Net(floors_then_sine), faults.wrong_if_fused("aten.sin.default"))
    assert location.op == "aten.sin.default"
    assert not any("shows it and is right" in note for note in location.notes)


@pytest.mark.process
def test_an_operator_of_floats_that_only_its_readers_show_is_named() -> None:
    assert located(inference, Net(booleans), faults.wrong_for_readers("aten.tanh.default")).op == "aten.tanh.default"
