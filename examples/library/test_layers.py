"""A library's tests as they are. ``pytest --numcheck examples/library`` checks what they compile."""

import torch
from torch import nn


class Gate(nn.Module):
    """A gated layer of the library."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.both = nn.Linear(width, 2 * width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The gated input."""
        value, gate = self.both(x).chunk(2, dim=-1)
        return value * gate.sigmoid()


def test_a_compiled_gate_trains() -> None:
    """The test asserts little; the check compares every output and gradient with eager."""
    torch.manual_seed(0)
    gate = Gate(8)
    compiled = torch.compile(gate)
    loss = compiled(torch.randn(4, 8)).square().mean()
    loss.backward()
    assert gate.both.weight.grad is not None


def test_another_size() -> None:
    """A second size compiles with symbolic sizes."""
    compiled = torch.compile(Gate(8))
    assert [compiled(torch.randn(size, 8)).shape[0] for size in (3, 5)] == [3, 5]
