"""For the author of a compiler: any callable ``(gm, example_inputs) -> callable`` is checked, here one with a bug.

Run it as ``python examples/compiler_author.py``.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn

import checked_backend as cb


def my_compiler(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """A "peephole optimisation" that holds for positive numbers only: relu(x) * relu(x) is x * x."""
    for node in gm.graph.find_nodes(op="call_function", target=torch.nn.functional.relu):
        users = [user for user in node.users if user.args == (node, node)]
        for user in users:
            user.args = (node.args[0], node.args[0])
    gm.recompile()
    return gm.forward


class Squared(nn.Module):
    """A layer with squared ReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The layer."""
        hidden = torch.nn.functional.relu(self.up(x))
        return self.down(hidden * hidden)


def main() -> cb.Report:
    """Check outputs and gradients in one call; eager and compiled run on copies."""
    torch.manual_seed(0)
    return cb.check(Squared(), (torch.randn(5, 8),), compiler=my_compiler)


if __name__ == "__main__":
    print(main())
