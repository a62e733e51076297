"""Dumps from strangers that are replayed: what they would do is refused with a sentence, and the process lives on.

Also what higher-order operators in them call, and what these are given.
"""

from __future__ import annotations

import platform
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import checked_backend as cb
from checked_backend.dump import rehearse
from tests.support.cli_tools import Run
from tests.support.hostile_tools import body, call, dumped_relu, forged, node, replayed

INT = {"dtype": "int64"}
X = node("l_x_")


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return dumped_relu(tmp_path_factory.mktemp("original"))


def far(name: str, *shape: int) -> dict[str, Any]:
    return call(name, "function:torch:full", list(shape), 10**9, dtype=INT)


def ones(name: str, *shape: int) -> dict[str, Any]:
    return call(name, "function:torch:ones", list(shape))


POOL = [far("i", 1, 1, 1), ones("p", 1, 4, 4), ones("g", 1, 1, 1)]
SHORT = ones("m", 1)
REFUSED: dict[str, tuple[list[dict[str, Any]], str]] = {
    "storage": ([call("s", "method:untyped_storage", X), call("r", "method:type", node("s"), "this.c")], "node s: "),
    "type": ([call("r", "method:type", X, "this.c")], "node r: eager refuses it: ValueError: invalid type"),
    "grown": ([call("r", "op:inductor.resize_storage_bytes_.default", X, 64)], "node r: .*may not call"),
    "unchecked": ([far("i", 3), call("r", "op:aten._unsafe_index.Tensor", X, [node("i")])], "node r: .*out of bounds"),
    "unchecked write": (
        [SHORT, far("i", 3), call("r", "op:aten._unsafe_index_put.default", X, [node("i")], node("m"))],
        "node r: eager refuses it",
    ),
    "strides": ([call("r", "op:aten.as_strided.default", X, [100], [1])], "node r: .*out of bounds for storage"),
    "offset": ([call("r", "method:as_strided", X, [2], [1], 2**62)], "node r: .*overflow"),
    "negative strides": ([call("r", "method:as_strided", X, [2], [-1], 3)], "node r: .*Negative strides"),
    "scattered strides": (
        [ones("y", 100), call("r", "op:aten.as_strided_scatter.default", X, node("y"), [100], [1])],
        "node r: .*out of bounds",
    ),
    "places of maxima": (
        [
            *POOL,
            call(
                "r",
                "op:aten.max_pool2d_with_indices_backward.default",
                *(node("g"), node("p"), [4, 4], [4, 4], [0, 0], [1, 1], False, node("i")),
            ),
        ],
        "node r: it would leave its memory: .*indices from 1000000000 to 1000000000, where 0 to 15 are there",
    ),
    "statistics": (
        [
            SHORT,
            call(
                "r",
                "op:aten.native_layer_norm_backward.default",
                *(X, X, [3], node("m"), node("m"), None, None, [True, False, False]),
            ),
        ],
        "node r: it would leave its memory: .*mean has 1 elements, not 4",
    ),
    "running statistics": (
        [SHORT, call("r", "op:aten.native_batch_norm.default", X, None, None, node("m"), node("m"), True, 0.1, 1e-5)],
        "node r: it would leave its memory: .*running_mean has 1 elements, not 3",
    ),
    "pivots": (
        [
            call("i", "function:torch:full", [3], 10**9, dtype={"dtype": "int32"}),
            call("a", "function:torch:eye", 3),
            call("r", "op:aten.linalg_lu_solve.default", node("a"), node("i"), node("a")),
        ],
        "node r: it would leave its memory: .*pivots from 1000000000",
    ),
    "steps": (
        [
            SHORT,
            ones("y", 10**6),
            call("s", "function:torch:tensor", 1.0),
            call(
                "r",
                "op:aten._fused_sgd_.default",
                *([node("y")], [node("m")], []),
                **dict.fromkeys(("weight_decay", "momentum", "lr", "dampening"), 0.0),
                **dict.fromkeys(("nesterov", "maximize", "is_first_step"), False),
            ),
        ],
        "node r: it would leave its memory: .*grads is of shape",
    ),
    "memory": ([ones("r", 10**12)], "node r: eager refuses it: .*memory"),
    "memory by repeating": ([call("r", "method:repeat", X, 10**6, 10**6)], "node r: eager refuses it: .*memory"),
    "memory in Python": (
        [call("q", "function:builtins:range", 10**12), call("r", "function:builtins:list", node("q"))],
        "node r: eager refuses it: MemoryError",
    ),
    "shapes": ([SHORT, call("r", "op:aten.mm.default", X, node("m"))], "node r: eager refuses it: RuntimeError"),
    "kinds": ([call("r", "op:aten.relu.default", 5)], "node r: eager refuses it"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_graph_that_would_leave_its_memory_is_refused(original: Path, tmp_path: Path, name: str) -> None:
    calls, why = REFUSED[name]
    dump = forged(original, tmp_path / "dump", calls)
    with pytest.raises(cb.DumpError, match=why) as refused:
        tried(dump)
    assert str(refused.value).startswith(f"{dump / 'graph.json'}: ")


@pytest.mark.process
def test_what_is_refused_is_told_in_a_sentence(run: Run, original: Path, tmp_path: Path) -> None:
    dump = forged(original, tmp_path / "dump", REFUSED["unchecked"][0])
    code, out, err = run("replay", dump, "--compiler", "eager")
    assert (code, out) == (3, "")
    assert err.startswith(f"checked-backend: {dump / 'graph.json'}: ")
    assert "node r: eager refuses it: IndexError" in err
    assert "Traceback" not in err


@pytest.mark.process
def test_an_honest_dump_is_not_refused(run: Run, original: Path, tmp_path: Path) -> None:
    dump = forged(original, tmp_path / "dump", [call("r", "op:aten.relu.default", X)])
    code, out, err = run("replay", dump, "--compiler", "eager")
    assert (code, err) == (0, "")
    assert out.startswith("PASS")


@pytest.mark.process
def test_what_does_not_end_is_ended(run: Run, original: Path, tmp_path: Path) -> None:
    dump = forged(original, tmp_path / "dump", [call("r", "function:math:factorial", 10**9)])
    for verb in ("replay", "localize"):
        code, _, err = run(verb, dump, "--compiler", "eager", "--timeout", "8")
        assert code == 3
        why = r"the process had not ended after 8 s while (reading the dump|running the graph in eager)"
        assert re.fullmatch(f"checked-backend: {re.escape(str(dump))}: {why}. Give it more with --timeout\n", err)


@pytest.mark.process
@pytest.mark.skipif(platform.machine() != "x86_64", reason="elsewhere a division by zero kills nobody")
def test_a_kernel_that_kills_its_process_is_told_in_a_sentence(original: Path, tmp_path: Path) -> None:
    empty, saved = ones("e", 0, 3), ones("s", 3)
    given = (node("e"), node("e"), None, None, None, node("s"), node("s"), True, 1e-5, [True, False, False])
    calls = [empty, saved, call("r", "op:aten.native_batch_norm_backward.default", *given)]
    dump = forged(original, tmp_path / "dump", calls)
    code, out, err = replayed(dump, "--compiler", "eager")
    assert (code, out) == (3, "")
    assert err == f"checked-backend: {dump}: the process was killed by SIGFPE while running the graph in eager\n"


LEAVING = body(
    ["a"], [far("i", 3), call("r", "op:aten._unsafe_index.Tensor", node("a"), [node("i")])], {"tuple": [node("r")]}
)
TRUE = call("p", "function:torch:ones", [], dtype={"dtype": "bool"})


def given(*values: Any) -> dict[str, Any]:
    return {"tuple": list(values)}


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
    switched_on = call("a", "function:torch:set_autocast_enabled", "cpu", True)
    tried(forged(original, tmp_path / "dump", [switched_on], ["l_x_"]))
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
