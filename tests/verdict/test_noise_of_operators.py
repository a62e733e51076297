"""What rounds inside of one operator is noise of that operator, and not more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func

import checked_backend as cb
from checked_backend._torch.aot import aot_autograd
from checked_backend._torch.operators import core_aten_decompositions, get_decompositions
from tests.support import faults
from tests.support.noise_tools import rounding_otherwise
from tests.support.region_tools import agreed, checked, found, gathered


def test_tails_do_not_acquit_what_the_twin_accuses() -> None:
    """Of the tail of gelu rounding leaves nothing, in the twin as little as in the candidate."""
    x, w = torch.randn(32, 64, dtype=torch.bfloat16), torch.randn(64, 64, dtype=torch.bfloat16)
    off = faults.spoiled_output(lambda result: (result.double() * 1.01).to(result.dtype))
    wrong, right = (checked(lambda x, w: F.gelu(x @ w), compiler) for compiler in (off, faults.clean()))
    assert found(gathered(lambda: wrong(x, w))) == {("logic", "output[0]")}
    assert agreed(gathered(lambda: right(x, w)))


def test_a_probability_that_rounds_to_more_than_one_is_none() -> None:
    """Operators that insist on a range are not given what no rounding makes."""
    x, target = torch.randn(4096) * 3, torch.randint(0, 2, (4096,)).float()
    x[0] = 16.0

    def loss(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.binary_cross_entropy(torch.sigmoid(x), target)

    assert agreed(gathered(lambda: checked(loss, faults.spoiled_output(rounding_otherwise))(x, target)))
    assert found(gathered(lambda: checked(loss, faults.spoiled_output(lambda r: r * 1.001))(x, target)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["lerp", "addcmul", "alpha"])
def test_products_that_cancel_inside_an_operator_are_noise(name: str, dtype: torch.dtype) -> None:
    program, fused = {
        "lerp": (lambda a, b, c: torch.lerp(a, b, 0.3), lambda a, b, c: a * 0.7 + b * 0.3),
        "addcmul": (lambda a, b, c: torch.addcmul(a, b, c, value=0.1), lambda a, b, c: (b * 0.1) * c + a),
        "alpha": (lambda a, b, c: torch.add(a, b, alpha=0.3), lambda a, b, c: b.double() * 0.3 + a),
    }[name]
    numbers = [torch.randint(-9, 10, (40, 50)).to(dtype) for _ in range(3)]

    @faults.runs
    def wider(_forward: Callable[..., Any], *args: torch.Tensor) -> list[torch.Tensor]:
        wide = [arg.float() if arg.dtype is torch.bfloat16 else arg for arg in args]
        return [fused(*(wide * 3)[:3]).to(args[0].dtype)]

    used = numbers if name == "addcmul" else [*numbers[:2], numbers[1]]
    assert agreed(gathered(lambda: checked(program, wider)(*used)))
    off = faults.spoiled_output(lambda result: (result.double() * 1.01).to(result.dtype))
    assert found(gathered(lambda: checked(program, off)(*used)))


def test_float8_results_are_compared() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return (x * 3).clamp(-400, 400).to(torch.float8_e4m3fn)

    x = torch.randn(64, 64, dtype=torch.bfloat16)
    assert agreed(gathered(lambda: checked(program, faults.clean())(x)))
    off = faults.spoiled_output(lambda result: (result.float() * 1.3).to(result.dtype))
    assert found(gathered(lambda: checked(program, off)(x)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("off", [False, True])
def test_a_program_that_calls_a_kernel_with_coarse_constants_is_right(dtype: torch.dtype, off: bool) -> None:
    """Compiled in float64 it calls the same kernel, which is not as exact as float64 is."""
    factor = 1.0001 if off else 1
    spoil = faults.wrong_operator("aten.hardsigmoid_backward.default", lambda grad: grad * factor, "aot")
    x = torch.randn(50, dtype=dtype, requires_grad=True)
    report = gathered(lambda: checked(torch.nn.functional.hardsigmoid, spoil)(x).square().sum().backward())
    assert report.verdict is (cb.Verdict.FAIL if off else cb.Verdict.PASS)


def test_a_kernel_with_coarse_constants_is_not_the_reference() -> None:
    """Eager's gradient of hardsigmoid has a sixth of float32 in float64, too."""
    table = get_decompositions([torch.ops.aten.hardsigmoid_backward])
    decomposed = aot_autograd(fw_compiler=lambda graph, _: make_boxed_func(graph.forward), decompositions=table)
    x = torch.randn(50, dtype=torch.bfloat16, requires_grad=True)
    model = checked(lambda x: torch.nn.functional.hardsigmoid(x * 2), decomposed)
    assert agreed(gathered(lambda: model(x).square().sum().backward()))


TAILS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "cross entropy": lambda x: F.cross_entropy(x * 40, x.argmax(-1)),
    "gelu": lambda x: F.gelu(x - 8),
    "gelu tanh": lambda x: F.gelu(x - 8, approximate="tanh"),
    "softmax": lambda x: F.softmax(x * 30, -1).log_softmax(-1),
    "tanh": lambda x: torch.tanh(x * 3 + 8),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, torch.float32) for name in TAILS), ("gelu", torch.bfloat16), ("tanh", torch.bfloat16)]
)
def test_what_cancels_inside_of_an_operator_is_noise(name: str, dtype: torch.dtype) -> None:
    """Of a probability of nearly 1, less 1, only the rounding of the probability is left."""

    def decomposed(gm: torch.fx.GraphModule, given: Sequence[Any]) -> Callable[..., Any]:
        """As Inductor does it, and with an exponential that is off by a unit in the last place."""

        def compile_graph(graph: torch.fx.GraphModule, _given: Sequence[Any]) -> Callable[..., Any]:
            for node in list(graph.graph.nodes):
                if node.target in (torch.ops.aten.exp.default, torch.ops.aten.erf.default, torch.ops.aten.tanh.default):
                    with graph.graph.inserting_after(node):
                        above = graph.graph.call_function(_next_above, (node,))
                    node.replace_all_uses_with(above, delete_user_cb=lambda user, above=above: user is not above)
            graph.recompile()
            return make_boxed_func(graph.forward)

        return aot_autograd(fw_compiler=compile_graph, decompositions=core_aten_decompositions())(gm, given)

    x = torch.randn(64, 50, dtype=dtype, requires_grad=True)
    model = checked(TAILS[name], decomposed)
    agreed(gathered(lambda: model(x).float().square().sum().backward()))


def _next_above(tensor: torch.Tensor) -> torch.Tensor:
    return torch.where(tensor == 0, tensor, torch.nextafter(tensor, tensor.new_full((), torch.inf)))
