"""Graphs as Python: Dynamo's graphs have plain torch functions, methods, statements and control flow."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from checked_backend.diagnose.reduce.failing_case import FailingCase
from checked_backend.diagnose.repro.translate import GraphWriter, name_of, write_program
from checked_backend.options import CheckOptions
from checked_backend.regions.graph_case import GraphCase
from checked_backend.regions.inputs import copy_values
from checked_backend.scripts.values import Untranslatable
from tests.support.reduce_tools import graph_of


def dynamo_graph(function: Callable[..., Any], *inputs: Any, dynamic: bool = False) -> tuple[fx.GraphModule, list[Any]]:
    """The graph that Dynamo makes of a function, and what it is called with."""
    found: list[tuple[fx.GraphModule, list[Any]]] = []

    def backend(gm: fx.GraphModule, _examples: Any) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            found.append((gm, copy_values(args)))
            return gm(*args)

        return run

    with torch.no_grad():
        torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic)(*inputs)
    return found[0]


def written(function: Callable[..., Any], *inputs: Any, dynamic: bool = False) -> tuple[GraphWriter, FailingCase]:
    gm, given = dynamo_graph(function, *inputs, dynamic=dynamic)
    program = FailingCase.of(GraphCase(gm, tuple(given), CheckOptions(), dynamic), "output[0]")
    return write_program(program, plain=True), program


def executed(text: GraphWriter, program: FailingCase) -> Any:
    lines = [
        "import torch",
        "import torch.nn.functional as F",
        *(f"import {module}" for module in text.imports),
        f"def program({', '.join(text.parameters)}):",
        *(f"    {line}" for line in text.lines),
    ]
    names: dict[str, Any] = {}
    exec("\n".join(lines), names)
    return names["program"](*copy_values(program.case.inputs))


def signs(x: Tensor, y: Tensor) -> Tensor:
    return -(x * y + 2) // (y - 0.5) ** 2 @ x.t()


def functions(x: Tensor, y: Tensor) -> Tensor:
    a = F.gelu(torch.linalg.vector_norm(x, dim=1, keepdim=True) + y, approximate="tanh")
    return torch.special.expm1(F.layer_norm(a, (6,))).to(torch.float64, copy=True)


def places(x: Tensor, y: Tensor) -> Tensor:
    return x[1:, None, ..., ::2] + y[0, torch.tensor([0, 2, 4])]


def statements(x: Tensor, y: Tensor) -> Tensor:
    z = x.clone()
    z[1:3] = y[1:3]
    z[:, 0] += 2
    z *= y
    z[2].zero_()
    return z.sin_()


def several(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    values, _ = x.max(dim=1)
    first, second = y.split([2, 4], dim=1)
    return torch.cat((first, second, values[:, None]), 1), torch.where(x > y, x, float("-inf"))


def chosen(x: Tensor, y: Tensor) -> Tensor:
    picked: Tensor = torch.cond(x.sum() > 0, lambda x, y: torch.sin(x) * y, lambda x, y: x - y, (x, y))
    return picked * 2


def looped(x: Tensor, y: Tensor) -> Tensor:
    def more(count: Tensor, _value: Tensor) -> Tensor:
        return count < 3

    def body(count: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return count + 1, torch.sin(value) * y

    start = torch.zeros((), dtype=torch.int64)
    found: tuple[Tensor, Tensor] = torch.ops.higher_order.while_loop(more, body, (start, x), ())
    return found[1]


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (signs, ["x * y", "@"]),
        (functions, ["F.gelu(", "torch.linalg.vector_norm(", "torch.special.expm1(", "torch.float64"]),
        (places, ["[1:, None, ..., ::2]", "[0, "]),
        (statements, ["[1:3] = ", " += 2", " *= ", ".zero_()", ".sin_()"]),
        (several, ["torch.cat((", 'float("-inf")']),
        (chosen, ["torch.cond(", "def "]),
        (looped, ["torch.ops.higher_order.while_loop(", "def "]),
    ],
)
def test_a_dynamo_graph_is_written_as_a_person_would(function: Callable[..., Any], words: list[str]) -> None:
    x, y = torch.rand(4, 6) + 0.5, torch.rand(4, 6)
    text, program = written(function, x, y)
    body = "\n".join(text.lines)
    assert [word for word in words if word not in body] == []
    expected = function(x.clone(), y.clone())
    torch.testing.assert_close(executed(text, program), expected, rtol=0, atol=0, equal_nan=True)


def test_sizes_that_vary_are_parameters() -> None:
    def function(x: Tensor) -> Tensor:
        return x.repeat(2, 1)[: math.floor(x.shape[0] / 2) + 1]

    x = torch.rand(4, 6)
    text, program = written(function, x, dynamic=True)
    assert len(text.parameters) > 1
    assert torch.equal(executed(text, program), function(x))


def test_names_are_those_that_people_use() -> None:
    names = {
        torch.relu: "torch.relu",
        F.gelu: "F.gelu",
        torch.linalg.cholesky: "torch.linalg.cholesky",
        torch.ops.aten.relu: "torch.ops.aten.relu",
        math.floor: "math.floor",
        operator.concat: "operator.concat",
        len: "len",
    }
    found = {function: name_of(function) for function in names}
    assert {function: name.text for function, name in found.items() if name is not None} == names
    assert name_of(lambda x: x) is None


def test_an_assignment_that_is_returned_is_none() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(operator.setitem, (x, 0, 1.0)),))
    gm = fx.GraphModule(graph_of(lambda x: x), graph)
    text = write_program(FailingCase.of(GraphCase(gm, (torch.zeros(2),), CheckOptions()), "output[0]"), plain=True)
    assert text.lines == ["x[0] = 1.0", "return None"]


def test_what_no_script_can_name_is_said() -> None:
    def local(x: Tensor) -> Tensor:
        return x

    graph = fx.Graph()
    graph.output((graph.call_function(local, (graph.placeholder("x"),)),))
    gm = fx.GraphModule(graph_of(lambda x: x), graph)
    program = FailingCase.of(GraphCase(gm, (torch.ones(2),), CheckOptions()), "output[0]")
    with pytest.raises(Untranslatable, match="local"):
        write_program(program, plain=True)
