"""Programs of several ranks, for `tests.support.ranks.run_ranks`."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import fx, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import checked_backend as cb
from tests.support import faults
from tests.support.low_precision import times
from tests.support.raising import raising
from tests.support.region_tools import checked, same_bits


class Sharded(nn.Module):
    """Two linear layers, the second of which adds up what the ranks have."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 32)
        self.second = nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        partial = self.second(self.first(x).relu())
        total = functional.all_reduce(partial, "sum", dist.group.WORLD)
        return torch.tanh(total * 0.5)


def _changed_graph(change: Callable[[fx.Graph, fx.Node], None], target: str) -> Callable[..., Any]:
    """A compiler that changes the first node of some name in the Dynamo graph."""

    def compiler(gm: fx.GraphModule, _inputs: Sequence[Any]) -> Callable[..., Any]:
        for node in gm.graph.nodes:
            if target in str(node.target):
                change(gm.graph, node)
                break
        else:
            raise AssertionError(f"no {target}: {gm.graph}")
        gm.recompile()
        return gm.forward

    return compiler


def _scale_result(factor: float) -> Callable[[fx.Graph, fx.Node], None]:
    def change(graph: fx.Graph, node: fx.Node) -> None:
        with graph.inserting_after(node):
            scaled = graph.call_function(torch.mul, (node, factor))
        node.replace_all_uses_with(scaled, delete_user_cb=lambda user: user is not scaled)

    return change


def _drop(graph: fx.Graph, node: fx.Node) -> None:
    node.replace_all_uses_with(node.args[0])
    graph.erase_node(node)


def _other_reduction(_graph: fx.Graph, node: fx.Node) -> None:
    node.args = (node.args[0], "max", *node.args[2:])


def _in_one_with_more(graph: fx.Graph, node: fx.Node) -> None:
    """As a compiler does that puts several small collectives into one."""
    with graph.inserting_before(node):
        doubled = graph.call_function(torch.cat, ([node.args[0], node.args[0]],))
    with graph.inserting_after(node):
        half = graph.call_function(torch.narrow, (node, 0, 0, 4))
    node.replace_all_uses_with(half, delete_user_cb=lambda user: user is not half)
    node.args = (doubled, *node.args[1:])


def faulty(fault: str) -> Callable[..., Any]:
    """A compiler with one fault; for the name of an ATen operator, that operator is wrong."""
    changes = {
        "before": (_scale_result(1.05), "relu"),
        "after": (_scale_result(1.05), "tanh"),
        "dropped": (_drop, "all_reduce"),
        "merged": (_in_one_with_more, "all_reduce"),
        "reduction": (_other_reduction, "all_reduce"),
    }
    if fault in changes:
        return _changed_graph(*changes[fault])
    return faults.wrong_operator(fault, how="aot")


def step(model: Callable[..., torch.Tensor], seed: int) -> torch.Tensor:
    """One forward and backward pass on random numbers."""
    loss = model(torch.randn(4, 16, generator=torch.Generator().manual_seed(seed))).square().sum()
    if torch.is_grad_enabled():
        loss.backward()
    return loss.detach()


def told(report: cb.Report) -> dict[str, Any]:
    """What a test asks of a report, as JSON."""
    return {
        "verdict": report.verdict.value,
        "findings": sorted({(found.detail, found.subject) for found in report.findings if found.fails}),
        "evidence": [dict(found.evidence) for found in report.findings],
        "located": [[found.subject, found.op, found.source] for found in report.findings],
        "skips": [[skip.subject, skip.reason, skip.matters] for skip in report.coverage.skipped],
        "checked": dict(report.coverage.checked),
        "regions": len(report.coverage.regions),
        "notes": list(report.coverage.notes),
        "text": str(report),
    }


def sharded(
    rank: int,
    world: int,
    *,
    fault: str = "",
    on: int | None = 1,
    steps: int = 4,
    gradients: bool = True,
    compiler: Any = "aot_eager",
    **options: Any,
) -> dict[str, Any]:
    """Train `Sharded`, checked; on one rank, or on all, the compiler may have a fault."""
    torch.manual_seed(rank)
    model = Sharded()
    if fault and on in (rank, None):
        compiler = faulty(fault)
    compiled = checked(model, compiler, **options)
    with cb.collect() as session, torch.set_grad_enabled(gradients):
        for number in range(steps):
            step(compiled, number)
    return told(session.report)


class HalfPrecision(nn.Module):
    """An activation on each side of an exchange."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 64)
        self.second = nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        partial = self.second(torch.nn.functional.gelu(self.first(x)))
        total = functional.all_reduce(partial, "sum", dist.group.WORLD)
        return torch.tanh(total * 0.5)


def half_precision(rank: int, world: int, *, fault: str = "") -> dict[str, Any]:
    """Train `HalfPrecision`; an operator may be too large by half a percent on rank 1, in this precision alone."""
    torch.manual_seed(rank)
    model = HalfPrecision().to(torch.float16)
    spoiled = fault and rank == 1
    compiled = checked(model, faults.wrong_operator(fault, times(1.005), "aot") if spoiled else "aot_eager")
    with cb.collect() as session:
        for number in range(2):
            x = torch.randn(64, 32, generator=torch.Generator().manual_seed(number))
            compiled(x.to(torch.float16)).square().sum().backward()
    return told(session.report)


def killed(rank: int, world: int) -> None:
    """Rank 1 is killed between two steps."""
    torch.manual_seed(rank)
    compiled = torch.compile(Sharded(), backend="numcheck", options={"compiler": "aot_eager"})
    for number in range(4):
        if rank == 1 and number == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        step(compiled, number)


def _rounded(node: fx.Node, value: Any) -> Any:
    linear = node.op == "call_function" and "linear" in str(node.target)
    return value * (1.0 + 2.0**-23) if linear else value


noisy = faults.interpreted(_rounded, "python")
"""A compiler whose matrix products round otherwise than eager's, so that control runs are made."""


def unlike(rank: int, world: int) -> dict[str, Any]:
    """Ranks that check other calls, and of which one needs control runs and the other does not."""
    return sharded(rank, world, steps=12, every=1 + 2 * rank, compiler=noisy if rank else "aot_eager")


class Blocks(nn.Module):
    """Some blocks in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


_PLAN = {"up": ColwiseParallel(), "down": RowwiseParallel()}


def _model(kind: str, world: int, compiled: Callable[[nn.Module], Any]) -> tuple[nn.Module, Any]:
    """A model, and what to call: compiled as programs of that kind do it."""
    model = Blocks()
    if kind == "ddp":
        return model, compiled(nn.parallel.DistributedDataParallel(model))
    if kind == "split ddp":  # buckets so small that Dynamo splits the graph between them
        dist._DEFAULT_FIRST_BUCKET_BYTES = 1024
        return model, compiled(nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.003))
    mesh = init_device_mesh("cpu", (world,))
    if kind == "tensor parallel":
        for block in model.blocks:
            parallelize_module(block, mesh, _PLAN)
        return model, compiled(model)
    for block in model.blocks:
        block.forward = compiled(block.forward)
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, model


def _trained(kind: str, rank: int, world: int, steps: int, compiled: Callable[[nn.Module], Any]) -> list[torch.Tensor]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, run = _model(kind, world, compiled)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    same_inputs = kind == "tensor parallel"
    for number in range(steps):
        optimizer.zero_grad()
        step(run, number if same_inputs else number * world + rank)
        optimizer.step()
    weights = [parameter.detach() for parameter in model.parameters()]
    return [weight.to_local() if isinstance(weight, DTensor) else weight for weight in weights]


class Block(nn.Module):
    """One of the blocks that training programs compile each by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


def replicated(rank: int, world: int, *, drifts: bool) -> dict[str, Any]:
    """Ranks with the same model; on rank 1 a parameter may get other bits after some steps."""
    torch.manual_seed(0)
    model = Block()
    compiled = checked(model, "eager")
    with cb.collect() as session, torch.no_grad():
        for number in range(9):
            if drifts and rank == 1 and number == 5:
                model.up.weight[3, 3] *= 1 + 2.0**-22
            compiled(torch.ones(2, 16))
            if number % 4 == 3:
                cb.compare_ranks(model)
    return told(session.report)


class Exchanging(nn.Module):
    """A layer between many kinds of collectives."""

    def __init__(self, recomputed: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.recomputed = recomputed

    def body(self, x: torch.Tensor) -> torch.Tensor:
        group = dist.group.WORLD
        everyone = functional.all_gather_tensor_autograd(self.linear(x), 0, group)
        own = functional.reduce_scatter_tensor_autograd(everyone.relu() * 0.5, "sum", 0, group)
        return torch.nn.functional.dropout(own, 0.25) + functional.all_reduce(own.square().mean(), "sum", group)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        group = dist.group.WORLD
        y = checkpoint(self.body, x, use_reentrant=False) if self.recomputed else self.body(x)
        with torch.no_grad():
            first = functional.broadcast(y.detach() * 2, 0, group)
            pair = functional.all_reduce_coalesced([y.detach(), y.detach() + 1], "max", group)
            total = y.detach() + 1
            dist.all_reduce(total)
            gathered = functional.all_gather_tensor(y.detach(), 0, group)
        return (y * (1 + first + pair[0] + pair[1] + total)).sum() + gathered.sum()


def exchanging(rank: int, world: int, *, recomputed: bool = False, **options: Any) -> dict[str, Any]:
    """Run `Exchanging` with random numbers; what it leaves is compared with a run of plain torch.compile."""
    left = []
    options = {"compiler": "aot_eager", "on_divergence": "record", "localize": False, **options}
    with cb.collect() as session:
        for backend, given in (("numcheck", options), (options["compiler"], None)):
            torch._dynamo.reset()
            torch.manual_seed(rank)
            model = Exchanging(recomputed)
            compiled = torch.compile(model, backend=backend, options=given)
            losses = [step(compiled, number * world + rank) for number in range(3)]
            left.append([*losses, model.linear.weight.grad, torch.get_rng_state()])
    return {**told(session.report), "equal": all(map(torch.equal, *left))}


def alike(
    rank: int, world: int, *, kind: str, steps: int = 6, compiler: str = "aot_eager", **options: Any
) -> dict[str, Any]:
    """Train a model unchecked and checked. Are the weights the same, bit for bit?"""
    plain = _trained(kind, rank, world, steps, lambda part: torch.compile(part, backend=compiler))
    with cb.collect() as session:
        watched = _trained(kind, rank, world, steps, lambda part: checked(part, compiler, **options))
    return {**told(session.report), "equal": same_bits(plain, watched)}


def piped(rank: int, world: int, *, handmade: bool, steps: int = 4, **options: Any) -> dict[str, Any]:
    """Train two stages of a pipeline, one on each of two ranks. Are the weights the same, checked or not?"""
    train = _piped_by_hand if handmade else _scheduled
    plain = train(rank, steps, lambda stage: torch.compile(stage, backend="aot_eager"))
    with cb.collect() as session:
        watched = train(rank, steps, lambda stage: checked(stage, "aot_eager", **options))
    return {**told(session.report), "equal": all(map(torch.equal, plain, watched))}


def _batch(number: int) -> torch.Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(number))


def _piped_by_hand(rank: int, steps: int, compiled: Callable[[nn.Module], Any]) -> list[torch.Tensor]:
    torch._dynamo.reset()
    torch.manual_seed(rank)
    stage = Block()
    run, optimizer = compiled(stage), torch.optim.AdamW(stage.parameters(), lr=1e-2)
    for number in range(steps):
        optimizer.zero_grad()
        if rank == 0:
            sent = run(_batch(number))
            dist.send(sent.detach(), 1)
            gradient = torch.empty_like(sent)
            dist.recv(gradient, 1)
            sent.backward(gradient)
        else:
            received = torch.empty(8, 16)
            dist.recv(received, 0)
            received.requires_grad_()
            run(received).square().mean().backward()
            dist.send(received.grad, 0)
        optimizer.step()
    return [parameter.detach() for parameter in stage.parameters()]


def _scheduled(rank: int, steps: int, compiled: Callable[[nn.Module], Any]) -> list[torch.Tensor]:
    torch._dynamo.reset()
    torch.manual_seed(rank)
    module = Block()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    stage = PipelineStage(compiled(module), rank, 2, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=nn.functional.mse_loss)
    for number in range(steps):
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(_batch(number))
        else:
            schedule.step(target=_batch(-1 - number))
        optimizer.step()
    return [parameter.detach() for parameter in module.parameters()]


# one rank has a fault


def data_parallel(rank: int, world: int, *, on: int) -> None:
    """Train with DDP, whose collectives are outside of every region; on one rank, which comes late, it is wrong."""
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(Block())
    compiler = faulty("aten.gelu.default") if rank == on else "aot_eager"
    compiled = torch.compile(model, backend="numcheck", options={"compiler": compiler, "localize": False})
    if rank == on:
        time.sleep(5)
    for number in range(4):
        step(compiled, number * world + rank)


def reordered(gm: fx.GraphModule, _inputs: Sequence[Any]) -> Callable[..., Any]:
    """A compiler that issues the second of two independent collectives first."""
    first, second = (node for node in gm.graph.nodes if "all_reduce" in str(node.target))
    for node in (*second.all_input_nodes, second):
        if node.op != "placeholder":
            first.prepend(node)
    gm.graph.lint()
    gm.recompile()
    return gm.forward


def sending_the_same(
    rank: int, world: int, *, fault: str = "", on: int | None = None, receives: bool = False
) -> dict[str, Any]:
    """Rank 0 sends the same in its exchanges, or nothing where it ``receives``, and rank 1 does not.

    One rank, or all, have the fault; without one the compiler turns the order of two exchanges round.
    """

    def exchanged(x: torch.Tensor) -> torch.Tensor:
        if receives:
            return functional.broadcast(x.sin(), 1, dist.group.WORLD)
        return functional.all_reduce(x.sin(), "sum", dist.group.WORLD)

    def program(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.tanh(exchanged(x) - 3 * exchanged(y))

    compiler = faulty(fault) if fault else reordered
    x = torch.full((4,), 0.5)
    with cb.collect() as session, torch.no_grad():
        checked(program, compiler if on in (rank, None) else "eager")(x * rank, x * rank * 2)
    return told(session.report)


class ExchangingTwice(nn.Module):
    """Two exchanges in each pass. Each operator between them has a derivative of another name."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.second = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = functional.all_reduce(self.first(x).relu(), "sum", dist.group.WORLD)
        return functional.all_reduce(self.second(total.tanh()), "sum", dist.group.WORLD).sigmoid()


def crashing(rank: int, world: int, *, at: str, on: int) -> None:
    """Train where the compiled backward pass of one rank raises at an operator."""
    torch.manual_seed(rank)
    compiler = faults.wrong_operator(f"aten.{at}.default", raising(faults.PlantedError("a kernel is missing")), "aot")
    step(checked(ExchangingTwice(), compiler if rank == on else "aot_eager"), rank + world)


def several(rank: int, world: int, *, programs: Sequence[Sequence[Any]]) -> list[Any]:
    """Run programs one after the other: (name, arguments)."""
    results = []
    for name, given in programs:
        torch._dynamo.reset()
        results.append(globals()[name](rank, world, **given))
    return results
