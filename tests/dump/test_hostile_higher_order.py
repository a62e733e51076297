"""Higher-order operators in dumps from strangers: what they call, and what they are given."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import checked_backend as cb
from checked_backend.dump import rehearse
from tests.support.hostile_tools import body, call, dumped_relu, forged, node

X, SIN = node("l_x_"), body(["a"], [call("r", "op:aten.sin.default", node("a"))], {"tuple": [node("r")]})
INT = {"dtype": "int64"}
FAR = call("i", "function:torch:full", [3], 10**9, dtype=INT)
LEAVING = body(["a"], [FAR, call("r", "op:aten._unsafe_index.Tensor", node("a"), [node("i")])], {"tuple": [node("r")]})
TRUE = call("p", "function:torch:ones", [], dtype={"dtype": "bool"})


def given(*values: Any) -> dict[str, Any]:
    return {"tuple": list(values)}


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return dumped_relu(tmp_path_factory.mktemp("original"))


def tried(dump: Path) -> None:
    loaded = cb.load_dump(dump)
    _ = loaded.module
    rehearse(loaded)


OF_BODIES: dict[str, tuple[list[dict[str, Any]], str]] = {
    "cond": ([TRUE, call("c", "higher_order:cond", node("p"), node("b"), node("b"), given(X))], "out of bounds"),
    "map": ([call("c", "higher_order:map_impl", node("b"), [X], [])], "out of bounds"),
    "wrap": ([call("c", "higher_order:wrap", node("b"), X)], "out of bounds"),
    "checkpoint": ([call("c", "higher_order:tag_activation_checkpoint", node("b"), X)], "out of bounds"),
    "strict_mode": ([call("c", "higher_order:strict_mode", node("b"), given(X))], "out of bounds"),
    "context_fn": (
        [call("c", "higher_order:tag_activation_checkpoint", node("b"), X, context_fn="x")],
        "has a context_fn, which is a function of the process",
    ),
    "a method": ([call("c", "method:half", node("b"))], "'b', which is a graph and no value"),
    "an attribute": ([call("c", "function:builtins:getattr", node("b"), "data")], "'b', which is a graph and no value"),
    "a list": ([call("c", "function:builtins:list", [node("b")])], "'b', which is a graph and no value"),
    "the result": ([call("c", "op:aten.sin.default", X)], "node output: uses 'b', which is a graph and no value"),
    "a tensor": ([call("c", "higher_order:wrap", X, X)], "eager refuses it: TypeError"),
    "an operator": ([call("c", "higher_order:wrap", {"target": "op:aten.set_.source_Tensor"}, X, X)], "may not call"),
    "a function": ([call("c", "higher_order:wrap", {"target": "function:os:system"}, X)], "bad value"),
    "too few": ([call("c", "higher_order:scan", node("b"))], "eager refuses it: TypeError"),
}


@pytest.mark.parametrize("name", OF_BODIES)
def test_bodies_are_called_by_higher_order_operators_under_the_guard(original: Path, tmp_path: Path, name: str) -> None:
    calls, why = OF_BODIES[name]
    returned = ["c", "b"] if name == "the result" else ["c"]
    with pytest.raises(cb.DumpError, match=why) as caught:
        tried(forged(original, tmp_path / "dump", calls, returned, {"b": LEAVING}))
    assert str(tmp_path / "dump" / "graph.json") in str(caught.value)


ENTERED: dict[str, list[dict[str, Any]]] = {
    "inference mode": [call("a", "function:torch.autograd.grad_mode:_enter_inference_mode", True)],
    "a transform of torch.func": [call("a", "function:torch._C._functorch:_grad_increment_nesting")],
}


@pytest.mark.parametrize("mode", ENTERED)
def test_a_mode_that_a_graph_does_not_leave_is_none_of_what_comes_after(
    original: Path, tmp_path: Path, mode: str
) -> None:
    calls = [*ENTERED[mode], call("r", "op:aten.sin.default", X)]
    with pytest.raises(cb.DumpError, match=rf"the graph enters {mode} and does not leave it"):
        tried(forged(original, tmp_path / "dump", calls))
    assert not torch.is_inference_mode_enabled()
    assert torch._C._functorch.maybe_current_level() is None


def test_autocast_that_a_graph_leaves_on_is_switched_off(original: Path, tmp_path: Path) -> None:
    tried(
        forged(original, tmp_path / "dump", [call("a", "function:torch:set_autocast_enabled", "cpu", True)], ["l_x_"])
    )
    assert not torch.is_autocast_enabled("cpu")


EMPTY: list[dict[str, Any]] = [
    call("e", "op:aten.empty.memory_format", [4, 3], dtype=INT),
    call("e", "op:aten.new_empty.default", X, [4, 3]),
    call("e", "op:aten.new_empty_strided.default", X, [4, 3], [1, 4]),
    call("e", "op:aten.empty_strided.default", [4, 3], [3, 1]),
    call("e", "op:aten.empty_permuted.default", [4, 3], [1, 0]),
    call(
        "e", "op:prims.empty_permuted.default", [4, 3], [1, 0], dtype=INT, device={"device": "cpu"}, requires_grad=False
    ),
    call("e", "packet:aten.empty_like", X),
    call("e", "function:torch:empty", 4, 3),
    call("e", "function:torch:empty_like", X, dtype=INT),
    call("e", "function:torch.Tensor:new_empty", X, [4, 3]),
    call("e", "method:new_empty", X, [4, 3]),
]


@pytest.mark.parametrize("made", EMPTY, ids=lambda made: re.sub(r"\W", "_", made["target"]))
def test_what_was_in_memory_before_is_not_in_a_graph(original: Path, tmp_path: Path, made: dict[str, Any]) -> None:
    """An index that is made of it would be another one in the compiled run."""
    loaded = cb.load_dump(forged(original, tmp_path / "dump", [made], ["e"]))
    for _ in range(5):
        spoilt = [torch.full((size,), 10**9, dtype=torch.int64) for size in (6, 12) for _ in range(20)]
        del spoilt
        (found,) = loaded.module(*loaded.inputs())
        assert not found.any()
    assert loaded.module.graph.find_nodes(op="call_function", target=torch.ops.aten.zero_.default)


def test_nor_is_it_in_what_a_higher_order_operator_makes(original: Path, tmp_path: Path) -> None:
    wrapped = call("c", "higher_order:wrap", {"target": "op:aten.empty_like.default"}, X)
    with pytest.raises(cb.DumpError, match="an argument of kind 'target' with a bad value"):
        tried(forged(original, tmp_path / "dump", [wrapped]))
