"""What regions are called."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from checked_backend.graphs.graph_name import graph_name, self_of

Names = list[str]


@pytest.fixture(autouse=True)
def _without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def noting(names: Names) -> Callable[..., Any]:
    def backend(gm: fx.GraphModule, _inputs: Sequence[Any]) -> Any:
        names.append(graph_name(gm))
        return gm.forward

    return backend


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).relu()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


class Broken(Model):
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x)


class Calls(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x) + 1


def scaled(x: Tensor) -> Tensor:
    return x * 2


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize(("cls", "regions"), [(Model, 1), (Broken, 2)])
def test_a_compiled_model_is_named_by_its_class(cls: type[Model], regions: int, in_place: bool) -> None:
    names: Names = []
    model: Any = cls()
    if in_place:
        model.compile(backend=noting(names))
    else:
        model = torch.compile(model, backend=noting(names))
    nn.Sequential(model)(torch.randn(2, 3))
    assert names == [cls.__name__] * regions


@pytest.mark.parametrize("in_place", [False, True])
def test_a_layer_that_is_compiled_by_itself_is_named_not_the_model_around_it(in_place: bool) -> None:
    names: Names = []
    model = Model()
    if in_place:
        model.second.compile(backend=noting(names))
    else:
        model.second = torch.compile(model.second, backend=noting(names))
    model(torch.randn(2, 3))
    assert names == ["Block"]


def test_a_compiled_function_is_named_also_where_a_module_calls_it() -> None:
    names: Names = []
    Calls(torch.compile(scaled, backend=noting(names)))(torch.randn(2, 3))
    assert names == ["scaled"]


def test_a_module_that_a_compiled_function_calls_is_not_the_region() -> None:
    names: Names = []
    block = Block()

    def step(x: Tensor) -> Tensor:
        return block(x) * 2

    torch.compile(step, backend=noting(names))(torch.randn(2, 3))
    assert names == ["step"]


def test_a_compiled_method_is_named() -> None:
    names: Names = []
    torch.compile(Block().forward, backend=noting(names))(torch.randn(2, 3))
    assert names == ["forward"]


class Reads:
    def written(self) -> object:
        frame = sys._getframe()
        frame.f_locals["made"] = 3  # as exec("made = 3") does
        assert self_of(frame) is self
        return frame.f_locals["made"]

    def traced(self) -> int:
        before = 1
        after = before + 1
        return after if self else 0


def test_asking_a_frame_takes_no_name_away() -> None:
    assert Reads().written() == 3

    def trace(frame: FrameType, event: str, _: object) -> Any:
        if event == "line":
            self_of(frame)
        return trace if frame.f_code.co_name == "traced" else None

    tracer = sys.gettrace()
    sys.settrace(trace)
    try:
        assert Reads().traced() == 2
    finally:
        sys.settrace(tracer)
