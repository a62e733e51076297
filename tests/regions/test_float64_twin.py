"""The candidate compiled in float64: when it is made, and what it must round as eager does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.multiprocessing.reductions import StorageWeakRef

from checked_backend.regions.float64_twin import computes_in_low_precision, float64_graph
from tests.support import faults
from tests.support.noise_tools import mlp, rounding_otherwise, train
from tests.support.region_tools import agreed, checked, dynamo_graph, found, gathered


class Counting:
    """A right compiler that keeps the dtype of each graph it compiles."""

    def __init__(self) -> None:
        self.compiled: list[torch.dtype] = []

    def __call__(self, gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        self.compiled.append(next(value.dtype for value in example_inputs if isinstance(value, torch.Tensor)))
        return gm.forward


HALVES = (torch.bfloat16, torch.float16)


@pytest.mark.parametrize(
    ("dtype", "cast"), [*((dtype, False) for dtype in (*HALVES, torch.float32, torch.float64)), (torch.float32, True)]
)
def test_a_region_in_half_precision_is_compiled_twice_more_in_all(dtype: torch.dtype, cast: bool) -> None:
    """Forward and backward pass share the twin, and the probe for single operators; later steps need none.

    One under autocast counts as half precision. In full precision, equal bit for bit, nothing is compiled once more.
    """
    compiler = Counting()
    assert agreed(gathered(lambda: train(checked(mlp(dtype), compiler), dtype, device_cast=cast)))
    assert compiler.compiled == [dtype, *[torch.float64, dtype] * (cast or dtype in HALVES)]


def test_inputs_of_another_kind_need_another_twin() -> None:
    """At the second, fourth and eighth call it is asked again, about what differs by more than before."""
    compiler, calls = Counting(), []
    last_bit = faults.spoiled_output(lambda r: r * (1 + 2.0**-7) if len(calls) > 1 and r.dtype in HALVES else r)

    def both(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        compiler(gm, example_inputs)
        return last_bit(gm, example_inputs)

    compiled = checked(lambda x: x.sin() * 2, both, dynamic=True)

    def run() -> None:
        for rows in (3, 4, 5, 4, 4, 4, 4, 4):
            calls.append(rows)
            compiled(torch.randn(rows, 4, dtype=torch.bfloat16))

    assert agreed(gathered(run))
    assert compiler.compiled == [torch.bfloat16, torch.float64, torch.bfloat16, torch.float64]


@pytest.mark.parametrize(
    ("program", "low"),
    [
        (lambda x: x.sin(), False),
        (lambda x: x.bfloat16().sin().float(), True),
        (lambda x: torch.utils.checkpoint.checkpoint(lambda y: y.half().float() * 2, x, use_reentrant=False), True),
        (lambda x: x.double().sum(), False),
    ],
)
def test_half_precision_is_found_wherever_it_is(program: Callable[..., Any], low: bool) -> None:
    seen: list[bool] = []

    def compiler(gm: torch.fx.GraphModule, _example_inputs: Sequence[Any]) -> Callable[..., Any]:
        seen.append(computes_in_low_precision(gm))
        return gm.forward

    torch.compile(program, backend=compiler, fullgraph=True)(torch.randn(4, requires_grad=True))
    assert seen == [low]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers_have_the_dtype_that_the_program_says(dtype: torch.dtype) -> None:
    """A constant of half precision is rounded, in eager in float64 and in the float64 twin."""
    rounding = faults.spoiled_output(rounding_otherwise, how="aot")
    program = checked(lambda x: torch.tanh(x) * torch.tensor([0.2, 0.7, 0.1], dtype=x.dtype), rounding)
    assert agreed(gathered(lambda: program(torch.randn(20, 3, dtype=dtype))))


@pytest.mark.parametrize("off", [False, True])
def test_grouped_products_have_a_float64_twin(off: bool) -> None:
    """Torch has no kernel of a grouped matrix product in float64; mixtures of experts are checked there too."""

    def experts(x: torch.Tensor, weights: torch.Tensor, router: torch.Tensor) -> torch.Tensor:
        gates, chosen = torch.softmax(x @ router, -1).max(-1)
        order = chosen.argsort()
        ends = F.one_hot(chosen, 4).sum(0).cumsum(0).to(torch.int32)
        return (F.silu(F.grouped_mm(x[order], weights, offs=ends)) * gates[order][:, None])[order.argsort()]

    shapes = (32, 16), (4, 16, 16), (16, 4)
    inputs = [torch.randn(shape, dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
    compiler = faults.scaled_gradient("weights", factor=1.001) if off else faults.spoiled_output(rounding_otherwise)
    report = gathered(lambda: checked(experts, compiler)(*inputs).square().sum().backward())
    assert found(report) == ({("logic", "grad[weights]")} if off else set())
    assert not report.coverage.skipped
    assert report.coverage.detection_limit["output[0]"] < 1e-6


def test_a_loop_has_a_float64_twin() -> None:
    def looping(x: torch.Tensor) -> torch.Tensor:
        def body(step: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return step + 1, torch.sin(y * 1.3) + 0.1

        return torch.while_loop(lambda step, _: step < 4, body, (torch.tensor(0), x))[1]

    with torch.no_grad():
        report = agreed(gathered(lambda: checked(looping, "aot_eager")(torch.randn(8, dtype=torch.bfloat16))))
    assert not report.coverage.skipped
    assert report.coverage.detection_limit["output[0]"] < 1e-8


@torch.library.custom_op("test_float64_twin::rounded", mutates_args=())
def rounded(x: torch.Tensor) -> torch.Tensor:
    return x.float().sin().bfloat16()


@torch.library.custom_op("test_float64_twin::slope", mutates_args=())
def slope(gradient: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return (gradient.float() * x.float().cos()).bfloat16()


rounded.register_fake(torch.empty_like)
slope.register_fake(lambda gradient, x: torch.empty_like(x))
rounded.register_autograd(
    lambda ctx, gradient: slope(gradient, ctx.saved_tensors[0]),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
)


@pytest.mark.parametrize("in_backward", [False, True])
def test_nothing_runs_compiled_in_float64_that_would_write_past_the_result_of_a_custom_operator(
    in_backward: bool,
) -> None:
    """Its kernel returns bfloat16 whatever it gets, its fake kernel the dtype that it gets: the same at bfloat16."""
    ran: list[torch.dtype] = []

    def result(node: torch.fx.Node, value: Any) -> Any:
        if node.target is torch.ops.test_float64_twin.rounded.default:
            ran.append(node.args[0].meta["val"].dtype)  # type: ignore[union-attr]
        return value

    compiled = checked(lambda x: rounded(x * 2) + 1, faults.interpreted(result, "aot"))

    def run() -> None:
        out = compiled(torch.rand(4, 5, dtype=torch.bfloat16, requires_grad=in_backward))
        if in_backward:
            out.sum().backward()

    report = agreed(gathered(run))
    assert set(ran) == {torch.bfloat16}
    told = [skip.reason for skip in report.coverage.skipped if skip.subject == "control: float64 twin"]
    assert len(told) == 1 + in_backward
    assert all("test_float64_twin.rounded.default" in reason for reason in told)


def written_through_to(h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    same = h.to(torch.float32)
    same *= 1.5
    return same.bfloat16() + h, h


def written_through_float(h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    h.float().mul_(1.5)
    return h.bfloat16().sin(), h


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("body", [written_through_to, written_through_float])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cast_gives_the_tensor_itself_or_another_one_as_it_does_for_the_user(
    body: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]], dtype: torch.dtype
) -> None:
    """In float64 no such cast would give the tensor itself, so that what is written to it would be lost."""
    for gradients in (False, True):
        torch._dynamo.reset()
        x = torch.randn(16, 32, dtype=dtype, requires_grad=gradients)
        compiled = checked(body, "aot_eager")

        def step(compiled: Any = compiled, x: torch.Tensor = x) -> None:
            out, _ = compiled(x * 1.0)
            if out.requires_grad:
                out.sum().backward()

        assert agreed(gathered(step))


CASTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "float": lambda x: x.float(),
    "double": lambda x: x.double(),
    "to": lambda x: x.to(torch.float32),
    "to, by name": lambda x: x.to(dtype=torch.float32, memory_format=torch.contiguous_format),
    "type": lambda x: x.type(torch.float32),
    "type_as": lambda x: x.type_as(torch.zeros(1)),
}


@pytest.mark.parametrize("cast", CASTS)
def test_a_cast_that_makes_another_tensor_does_so_in_float64(cast: str) -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        wide = CASTS[cast](x)
        wide.mul_(3.0)
        return x.float() + wide

    graph = dynamo_graph(program, torch.ones(4, dtype=torch.bfloat16))
    exact = torch.ones(4, dtype=torch.float64)
    [made] = float64_graph(graph)(exact)
    assert made.dtype is torch.float64
    assert torch.equal(made, torch.full_like(exact, 4.0))
    assert torch.equal(exact, torch.ones_like(exact))


def test_a_cast_to_complex_numbers_is_one_to_wide_ones_in_float64() -> None:
    program = checked(lambda x, half: (torch.sigmoid(x.cfloat()), half.exp()), "eager")
    agreed(gathered(lambda: program(torch.tensor(0.3), torch.ones(4, dtype=torch.bfloat16))))


def test_no_run_in_float64_writes_to_the_users_tensor() -> None:
    x, program = torch.ones(2, 3, dtype=torch.float64), checked(lambda x, y: (x.half().fill_(2), y.sgn())[1], "eager")
    assert agreed(gathered(lambda: program(x, torch.randn(2))))
    assert torch.equal(x, torch.ones(2, 3, dtype=torch.float64))


def test_a_backward_pass_in_float64_frees_what_it_has_used() -> None:
    freed: list[list[bool]] = []

    def compiler(gm: torch.fx.GraphModule, _example_inputs: Sequence[Any]) -> Callable[..., Any]:
        def run(*args: torch.Tensor) -> Any:
            outputs = gm.forward(*args)
            if args[0].dtype is torch.float64 and outputs[0].requires_grad:
                inputs = [StorageWeakRef(one.untyped_storage()) for one in args]
                (inner, _), _ = outputs[0].grad_fn.next_functions
                inner.register_prehook(lambda _gradients: freed.append([one.expired() for one in inputs]))
            return outputs

        return run

    inputs = (torch.randn(4, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    compiled = checked(lambda x, a, b: x * a * b, compiler)
    assert agreed(gathered(lambda: compiled(*inputs).sum().backward()))
    assert freed == [[False, False, True]]
