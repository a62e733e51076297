"""What the tests of `check` share."""

from __future__ import annotations

import dataclasses
from collections import namedtuple
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn

import checked_backend as cb
from checked_backend.checking.program import Program, ProgramCall
from checked_backend.modes.monte_carlo import MonteCarloMode
from checked_backend.regions.torch_state import RngState
from tests.support import faults
from tests.support.region_tools import agreed as agreed
from tests.support.region_tools import found as found

Pair = namedtuple("Pair", "left right")


@dataclasses.dataclass
class Record:
    tensor: torch.Tensor
    rest: Any = None


class Holder:
    """No container that torch knows."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.layer = nn.Linear(3, 3)

    def method(self, x: torch.Tensor) -> torch.Tensor:
        self.tensor += 1
        return self.layer(x) + self.tensor

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.method(x)


class Net(nn.Module):
    """Batch norm and dropout between two linear layers."""

    def __init__(self, dropout: float = 0.2) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(dropout))
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(x))


class Counting(nn.Module):
    """Counts its calls in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * self.calls


def batch(*shape: int, grad: bool = False) -> torch.Tensor:
    return torch.randn(*(shape or (6, 8)), requires_grad=grad)


def only(report: cb.Report) -> cb.Finding:
    """The one finding of a report that failed."""
    if report.verdict is not cb.Verdict.FAIL or len(report.findings) != 1:
        raise AssertionError(str(report))
    return report.findings[0]


def skips(report: cb.Report) -> str:
    return "\n".join(f"{skip.subject}: {skip.reason}" for skip in report.coverage.skipped)


def undecided(report: cb.Report) -> str:
    """What was left out of a program that neither fails nor passes."""
    if report.verdict is not cb.Verdict.INCONCLUSIVE:
        raise AssertionError(str(report))
    return skips(report)


def program_of(function: Callable[..., Any], *args: Any, gradients: bool = True) -> Program:
    """One call of a function, from the random state that there is."""
    return Program(function, [ProgramCall(args, {})], RngState.capture(), gradients=gradients)


def differentiated(forward: Callable[..., Any], backward: Callable[..., Any]) -> Callable[..., Any]:
    """A function with a backward pass of its own, which is given the gradient alone."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return forward(x)

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return backward(gradient)

    return Function.apply


def wrong_sine(gm: fx.GraphModule, _example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """A compiler that computes a cosine for each sine."""
    for node in gm.graph.find_nodes(op="call_method", target="sin"):
        node.target = "cos"
    gm.recompile()
    return gm.forward


def rounding_otherwise(gm: fx.GraphModule, _example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """A right compiler whose every rounding goes another way than eager's."""
    calls = iter(range(10**6))

    def run(*args: Any) -> Any:
        with MonteCarloMode(10_000 + next(calls), 1.0):
            return gm.forward(*args)

    return run


def wrong_where(
    condition: Callable[[Sequence[torch.Tensor]], bool],
) -> Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]:
    """A compiler whose results are one too large where a condition on the tensors among its inputs holds."""

    @faults.runs
    def compiler(forward: Callable[..., Any], *args: Any) -> Any:
        wrong = condition([arg for arg in args if isinstance(arg, torch.Tensor)])
        outputs = forward(*args)
        return tuple(output + 1 for output in outputs) if wrong else outputs

    return compiler
