"""A lie inside of a higher-order operator's graph is found there, and named there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.map import map as map_rows
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

from checked_backend.aot.boxed import boxed
from checked_backend.findings import Finding
from checked_backend.metadata.interpreter import MetadataInterpreter
from checked_backend.metadata.steps import producer
from tests.support.lying_operators import NAME, define, local, record, transposed

Program = Callable[..., Any]
Plant = Callable[[fx.Node], "torch.Tensor | None"]


def square(free: bool = False) -> torch.Tensor:
    return torch.randn(4, 4, requires_grad=free)


def heads() -> torch.Tensor:
    return torch.randn(1, 2, 128, 16)


def branch(x: torch.Tensor) -> Any:
    return torch.cond(x.sum() > -100, lambda x: x.sinh() + 1, lambda x: x.cos(), (x,))


def nested(x: torch.Tensor) -> Any:
    return torch.cond(x.sum() > -100, lambda x: branch(x) * 2, lambda x: x.cos(), (x,))


def loop(x: torch.Tensor) -> Any:
    return while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x.sinh() + 1), (torch.tensor(0), x))


def loop_condition(x: torch.Tensor) -> Any:
    start = torch.tensor(0), x
    return while_loop(lambda i, x: x.sinh().sum() + i < i + 1e9 * (3 - i), lambda i, x: (i + 1, x + 1), start)


def scanned(x: torch.Tensor) -> Any:
    return scan(lambda carry, row: (carry + row, (carry * row).sinh()), torch.zeros(4), x)


def associated(x: torch.Tensor) -> Any:
    return associative_scan(lambda a, b: (a + b).sinh(), x, 0, combine_mode="generic")


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
    return flex_attention(q, k, v, score_mod=lambda score, b, h, i, j: (score * 0.01).sinh())


def masked_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any) -> Any:
    return flex_attention(q, k, v, block_mask=mask)


def heads_and_mask() -> tuple[Any, ...]:
    mask = create_block_mask(lambda b, h, i, j: (i - j).float().sinh() > -1, None, None, 128, 128, device="cpu")
    return heads(), heads(), heads(), mask


def region(x: torch.Tensor) -> Any:
    @torch.compiler.nested_compile_region
    def layer(x: torch.Tensor) -> torch.Tensor:
        return x.sinh().relu().t().contiguous()

    return layer(layer(x))


PROGRAMS: dict[str, tuple[Program, Callable[[], tuple[Any, ...]], str]] = {
    "cond": (branch, lambda: (square(),), "of cond"),
    "cond in cond": (nested, lambda: (square(),), "of cond, in"),
    "cond, training": (branch, lambda: (square(True),), "of cond"),
    "while_loop": (loop, lambda: (square(),), "body"),
    "while_loop's condition": (loop_condition, lambda: (square(),), "cond"),
    "scan": (scanned, lambda: (square(),), "of scan"),
    "map": (lambda x: map_rows(lambda row: row.sinh() + 1, x), lambda: (square(),), "of map"),
    "associative_scan": (associated, lambda: (square(),), "node["),  # torch takes it apart
    "flex_attention's score": (attention, lambda: (heads(), heads(), heads()), "of flex_attention"),
    "flex_attention's mask": (masked_attention, heads_and_mask, "of flex_attention"),
    "invoke_subgraph": (region, lambda: (square(),), "of invoke_subgraph"),
    "invoke_subgraph, training": (region, lambda: (square(True),), "of invoke_subgraph"),
}


DEFAULT = ("cond", "while_loop", "invoke_subgraph, training")


def graphs(gm: fx.GraphModule) -> Iterator[fx.GraphModule]:
    yield gm
    for child in gm.children():
        if isinstance(child, fx.GraphModule):
            yield from graphs(child)


def planted(program: Program, args: tuple[Any, ...], plant: Plant | None) -> list[Finding]:
    """Run forward and backward with what was recorded of some nodes replaced, as a lying fake kernel would leave it."""
    found: list[Finding] = []

    def compiler(kind: str) -> Any:
        def compile_graph(gm: fx.GraphModule, _inputs: Any) -> Any:
            for node in (node for graph in graphs(gm) for node in graph.graph.nodes if plant is not None):
                lie = plant(node)
                if lie is not None:
                    node.meta["val"] = lie
            return boxed(MetadataInterpreter(gm, kind, found.extend))

        return compile_graph

    backend = aot_autograd(
        fw_compiler=compiler("forward"), bw_compiler=compiler("backward"), inference_compiler=compiler("inference")
    )
    results = torch.utils._pytree.tree_leaves(torch.compile(program, backend=backend)(*args))
    free = [leaf for leaf in results if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    if free:
        torch.autograd.backward(free, [torch.ones_like(leaf) for leaf in free])
    return found


def wrong_dtype(name: str) -> Plant:
    def plant(node: fx.Node) -> torch.Tensor | None:
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or name not in str(node.target):
            return None
        with FakeTensorMode():
            return torch.empty(tuple(map(int, value.shape)), dtype=torch.float16)

    return plant


@pytest.mark.filterwarnings("ignore:invoke_subgraph traced multiple:UserWarning")
@pytest.mark.parametrize(
    "name", [name if name in DEFAULT else pytest.param(name, marks=pytest.mark.slow) for name in PROGRAMS]
)
def test_a_lie_inside_is_found_inside(name: str) -> None:
    program, make, place = PROGRAMS[name]
    args = make()
    assert planted(program, args, None) == []
    torch._dynamo.reset()
    local = [f for f in planted(program, args, wrong_dtype("sinh")) if not f.evidence["inherited"]]
    findings = [f for f in local if place in f.subject]
    told = {(f.op, f.detail, f.expected, f.actual) for f in findings}
    assert told == {("aten.sinh.default", "structure.dtype", "torch.float16", "torch.float32")}, f"not found {place}"
    assert "sinh()" in findings[0].source
    assert "test_subgraphs.py:" in findings[0].source


def test_a_lie_inside_of_a_checkpoint_is_found_in_the_forward_and_where_it_is_recomputed(library: Any) -> None:
    liar = define(library, "liar(Tensor x) -> Tensor", transposed, torch.empty_like)

    def program(x: torch.Tensor) -> Any:
        return checkpoint(lambda x: (liar(x.detach()).sin() * x).sin(), x, use_reentrant=False)

    found = {(f.graph, f.op) for f in local(record(program, (torch.randn(3, 4, requires_grad=True),)))}
    assert found == {(graph, f"{NAME}.liar.default") for graph in ("forward", "backward")}


def dropped(x: torch.Tensor) -> Any:
    return checkpoint(lambda x: F.dropout(x.sin(), 0.5).sin(), x, use_reentrant=False)


def test_random_numbers_that_a_checkpoint_draws_again_are_checked() -> None:
    assert planted(dropped, (square(True),), None) == []
    torch._dynamo.reset()
    drawn: list[str] = []

    def plant(node: fx.Node) -> torch.Tensor | None:
        # the operators that keep and set the random state have no recorded value, the items of their results have
        maker = producer(node)
        value = node.meta.get("val")
        if "rng_state" not in str(maker.target) or maker.op == "placeholder" or not isinstance(value, torch.Tensor):
            return None
        if value.dtype is not torch.float32:
            return None
        drawn.append(str(maker.target))
        with FakeTensorMode():
            return torch.empty(4, 3)

    local = [f for f in planted(dropped, (square(True),), plant) if not f.evidence["inherited"]]
    assert sorted(set(drawn)) == ["run_and_save_rng_state", "run_with_rng_state"]
    assert {(f.graph, f.detail, f.expected, f.actual) for f in local} == {
        (graph, "structure.shape", "(4, 3)", "(4, 4)") for graph in ("forward", "backward")
    }


@pytest.mark.parametrize("lies", [False, True])
def test_functionalised_random_numbers_are_checked(lies: bool) -> None:
    """The operator has no kernel for the CPU, so it gets one here; torch itself functionalises on CUDA only."""

    def kernel(size: Any, seed: torch.Tensor, offset: torch.Tensor, *_: Any, **__: Any) -> Any:
        drawn = torch.rand(size, generator=torch.Generator().manual_seed(int(seed)))
        return (drawn.t().contiguous().t() if lies else drawn), offset + 4

    def program(seed: torch.Tensor, offset: torch.Tensor) -> Any:
        drawn, offset = torch.ops.rngprims.philox_rand((3, 4), seed, offset, None, torch.device("cpu"), torch.float32)
        return drawn * 2, offset

    found: list[Finding] = []
    with torch.library._scoped_library("rngprims", "IMPL") as library:
        library.impl("philox_rand", kernel, "CPU")
        gm = make_fx(program, tracing_mode="fake")(torch.tensor(1), torch.tensor(0))
        MetadataInterpreter(gm, "inference", found.extend)([torch.tensor(1), torch.tensor(0)])
    local = [(f.op, f.detail, f.subject) for f in found if not f.evidence["inherited"]]
    assert local == ([("rngprims.philox_rand.default", "structure.stride", "node[philox_rand][0]")] if lies else [])
