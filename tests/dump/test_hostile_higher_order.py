"""Higher-order operators in dumps from strangers: what they call, what they are given, and the tables they follow."""

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


def attention(
    index: int = 0, count: int = 1, rows: Any = 32, columns: Any = 32, dtype: str = "int32", blocks: int = 4
) -> list[dict[str, Any]]:
    """Attention over 128 keys in 4 blocks; each row of blocks looks at ``count`` of them, at ``index``."""
    kind = {"dtype": dtype}
    tables = [
        call("n", "function:torch:full", [1, 1, blocks], count, dtype=kind),
        call("i", "function:torch:full", [1, 1, blocks, 4], index, dtype=kind),
    ]
    both = [node("n"), node("i"), None, None]
    mask = given(128, 128, *both, *both, None, None, None, None, rows, columns, node("m"))
    words = ("PRESCALE_QK", "ROWS_GUARANTEED_SAFE", "BLOCKS_ARE_CONTIGUOUS", "OUTPUT_LOGSUMEXP", "OUTPUT_MAX")
    options = {"dict": [["BACKEND", "AUTO"], ["WRITE_DQ", True], *([word, False] for word in words)]}
    return [
        *(call(name, "function:torch:ones", [1, 2, 128, 16]) for name in "qkv"),
        *tables,
        call(
            "c",
            "higher_order:flex_attention",
            *(node("q"), node("k"), node("v"), node("s"), mask, 0.25, options, given(), given()),
        ),
        call("r", "function:operator:getitem", node("c"), 0),
    ]


BODIES = {
    "s": body(["s", "b", "h", "q", "k"], [], node("s")),
    "m": body(["b", "h", "q", "k"], [call("r", "op:aten.ge.Tensor", node("q"), node("k"))], node("r")),
}
TABLES: list[tuple[dict[str, Any], str]] = [
    ({"index": 10**6}, "kv_indices from 1000000 to 1000000, where 0 to 3 are there"),
    ({"index": 4}, "kv_indices from 4 to 4, where"),
    ({"index": -1}, "kv_indices from -1 to -1, where"),
    ({"count": 5}, "kv_num_blocks from 5 to 5, where 0 to 4 are there"),
    ({"count": -1}, "kv_num_blocks from -1 to -1"),
    ({"blocks": 1}, r"kv_num_blocks is of shape \(1, 1, 1\), where \(1, 2, 4\) is needed"),
    ({"rows": 0}, "a block of its mask has 0 rows"),
    ({"columns": -5}, "a block of its mask has -5 columns"),
    ({"columns": 2**62}, "a block of its mask has"),
    ({"rows": 1.5}, "a block of its mask has 1.5 rows"),
    ({"dtype": "float32"}, "not torch.int32"),
    ({"columns": 64, "index": 2}, "where 0 to 1 are there"),
]


@pytest.mark.parametrize(("how", "why"), TABLES, ids=str)
def test_tables_of_blocks_stay_within_the_keys(original: Path, tmp_path: Path, how: dict[str, Any], why: str) -> None:
    with pytest.raises(cb.DumpError, match=f"node c: it would leave its memory: flex_attention: .*{why}"):
        tried(forged(original, tmp_path / "dump", attention(**how), bodies=BODIES))


@pytest.mark.parametrize(
    "how", [{}, {"index": 3}, {"index": 10**6, "count": 0}, {"rows": 2**30, "columns": 2**30, "blocks": 1}]
)
def test_tables_that_do_are_not_refused(original: Path, tmp_path: Path, how: dict[str, Any]) -> None:
    tried(forged(original, tmp_path / "dump", attention(**how), bodies=BODIES))


def test_tables_are_looked_at_also_within_bodies(original: Path, tmp_path: Path) -> None:
    within = body(["a"], attention(index=10**6), {"tuple": [node("r")]})
    within["nodes"][1:1] = [{**call(name, name), "op": "get_attr"} for name in BODIES]
    within["subgraphs"] = BODIES
    dump = forged(original, tmp_path / "dump", [call("c", "higher_order:wrap", node("b"), X)], bodies={"b": within})
    with pytest.raises(cb.DumpError, match="flex_attention: kv_indices from 1000000"):
        tried(dump)


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
