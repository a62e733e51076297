"""`checked`: one AOT compiler's graphs against the same graphs run eagerly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from functorch.compile import aot_function, aot_module
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd

import checked_backend as cb
from checked_backend.aot.decompositions import decomposition_table
from checked_backend.errors import DivergenceWarning
from tests.support import faults
from tests.support.region_tools import agreed, as_the_engine

aot = cb.aot_compilers


def function(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return (x.sin() * y).relu().sum(0), nn.functional.dropout(x, 0.5)


def smooth(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return (x.sin() * y).relu().sum(0), x.tanh()


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(3, 4, requires_grad=True), torch.randn(3, 4, requires_grad=True)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh())


def replacing(old: Any, new: Any) -> Callable[[fx.GraphModule, Sequence[Any]], Any]:
    """A compiler that is wrong about one operator; what it returns is not boxed."""

    def compile_graph(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        for node in gm.graph.find_nodes(op="call_function", target=old):
            node.target = new
        gm.recompile()
        return gm.forward

    return compile_graph


ATEN = torch.ops.aten
WRONG_BACKWARD = replacing(ATEN.cos.default, ATEN.sin.default)


def train(call: Callable[..., Any], *given: torch.Tensor) -> Any:
    out = call(*given)
    leaves = [leaf for leaf in (out if isinstance(out, (tuple, list)) else (out,)) if leaf.requires_grad]
    return torch.autograd.grad(sum(leaf.square().sum() for leaf in leaves), given, allow_unused=True)


# TorchScript drops a useless native_dropout from the backward graph, and with it random numbers that eager draws
@pytest.mark.parametrize(
    ("compiler", "function"),
    [("nop", function), ("interpret", smooth), ("torchscript", smooth), (aot.nop, smooth), (WRONG_BACKWARD, smooth)],
    ids=["nop", "interpret", "torchscript", "callable", "wrong"],
)
def test_forward_and_backward_of_a_function(compiler: Any, function: Callable[..., Any]) -> None:
    given = inputs()
    if compiler is WRONG_BACKWARD:
        with pytest.raises(cb.DivergenceError) as caught:
            train(aot_function(function, aot.checked(compiler)), *given)
        (finding,) = caught.value.report.findings
        assert (finding.kind, finding.subject, finding.graph) == (cb.Kind.LOGIC, "grad[primals_1]", "backward")
        return
    with cb.collect() as session:
        torch.manual_seed(1)
        gradients = train(aot_function(function, aot.checked(compiler)), *given)
    assert session.report.verdict is cb.Verdict.PASS, str(session.report)
    kinds = [region.name.split(", ")[1] for region in session.report.coverage.regions]
    assert kinds == ["forward graph 0", "backward graph 1"]
    torch.manual_seed(1)
    assert all(map(torch.equal, train(aot_function(function, aot.nop), *given), gradients))


def test_a_module_with_changing_buffers() -> None:
    module, twin = net(), net()
    twin.load_state_dict(module.state_dict())
    x = torch.randn(5, 4)
    with cb.collect() as session:
        aot_module(module, aot.checked("nop"))(x).square().sum().backward()
    aot_module(twin, aot.nop)(x).square().sum().backward()
    assert session.report.verdict is cb.Verdict.PASS, str(session.report)
    assert all(map(torch.equal, module.state_dict().values(), twin.state_dict().values()))
    for one, other in zip(module.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


@pytest.mark.process
@pytest.mark.parametrize("dynamic", [False, True])
def test_under_dynamo_with_an_inference_graph(dynamic: bool) -> None:
    module = net()
    compiled = torch.compile(module, backend=aot_autograd(fw_compiler=aot.checked("nop")), dynamic=dynamic)
    with cb.collect() as session:
        for size in (5, 6):
            compiled(torch.randn(size, 4)).sum().backward()
        with torch.no_grad():
            compiled(torch.randn(5, 4))
    assert session.report.verdict is cb.Verdict.PASS, str(session.report)
    kinds = {region.name.split(", ")[1].split()[0] for region in session.report.coverage.regions}
    assert kinds == {"forward", "backward", "inference"}


@pytest.mark.parametrize("entry", ["aot_autograd", "aot_function"])
def test_views_of_inputs_are_for_aot_autograd_to_differentiate(entry: str) -> None:
    """It makes them anew of what its graph returns, whether or not that requires grad."""

    def views(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (x.t(), x * 2, *x.split(2))

    checking = aot.checked("nop")
    x = torch.randn(4, 3, requires_grad=True)
    if entry == "aot_autograd":
        compiled = torch.compile(views, backend=aot_autograd(fw_compiler=checking))
    else:
        compiled = aot_function(views, checking)
    assert all(map(torch.equal, compiled(x), views(x)))
    assert all(out.requires_grad for out in compiled(x))


def test_a_wrong_saved_activation_is_called_so() -> None:
    @faults.runs
    def spoil(forward: Callable[..., Any], *args: Any) -> Any:
        out = list(forward(*args))
        return [*out[:-1], out[-1] + 1]

    with pytest.raises(cb.DivergenceError) as caught:
        train(aot_function(lambda x: x.exp() * 2, aot.checked(spoil)), torch.randn(3, requires_grad=True))
    (finding,) = caught.value.report.findings
    assert (finding.subject, finding.graph) == ("saved[detach]", "forward")


def test_strides_of_what_is_saved_are_the_compilers_to_choose() -> None:
    @faults.runs
    def relayout(forward: Callable[..., Any], *args: Any) -> Any:
        out = list(forward(*args))
        return [*out[:-1], out[-1].t().contiguous().t()]

    x = torch.randn(3, 4, requires_grad=True)
    with cb.collect() as session:
        aot_function(lambda t: t.exp() * 2, aot.checked(relayout, on_divergence="record"), bw_compiler=aot.nop)(x)
    assert session.report.verdict is cb.Verdict.PASS, str(session.report)
    with torch.no_grad(), cb.collect() as session:
        aot_function(lambda t: t.exp() * 2, aot.checked(relayout, on_divergence="record"))(x)
    assert [finding.detail for finding in session.report.findings] == ["structure.stride"]


@pytest.mark.parametrize("answer", ["warn", "record", "fallback"])
def test_answers(answer: str) -> None:
    x = torch.randn(6, requires_grad=True)
    expected = train(lambda t: t.sin().relu(), x)
    with cb.collect() as session:
        run = aot_function(lambda t: t.sin().relu(), aot.checked(WRONG_BACKWARD, on_divergence=answer))
        if answer == "warn":
            with pytest.warns(DivergenceWarning, match=r"grad\[primals_1\]"):
                gradients = train(run, x)
        else:
            gradients = train(run, x)
    assert session.report.verdict is cb.Verdict.FAIL
    assert torch.equal(gradients[0], expected[0]) is (answer == "fallback")


def test_the_user_gets_what_the_compiler_computed_and_its_random_state() -> None:
    given = inputs()
    torch.manual_seed(3)
    expected = aot_function(function, aot.nop)(*given)
    state = torch.get_rng_state()
    torch.manual_seed(3)
    assert all(map(torch.equal, expected, aot_function(function, aot.checked("nop"))(*given)))
    assert torch.equal(state, torch.get_rng_state())


def test_a_compiler_that_raises_is_a_finding_and_eager_goes_on() -> None:
    def broken(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        raise RuntimeError("no luck")

    x = torch.randn(3)
    with cb.collect() as session:
        out = aot_function(torch.sin, aot.checked(broken, on_divergence="record"))(x)
    assert torch.equal(out, x.sin())
    (finding,) = session.report.findings
    assert (finding.detail, finding.graph) == ("crash.compiling", "inference")
    assert "no luck" in finding.message


@pytest.mark.parametrize(
    ("compiler", "options", "message"),
    [
        ("nonsense", {}, r"compiler got 'nonsense'. Valid: inductor, interpret, nop"),
        (3, {}, "compiler got 3"),
        ("nop", {"gradients": True}, "option 'gradients' is for a backend"),
        ("nop", {"bogus": 1}, "no option 'bogus'"),
        ("nop", {"on_divergence": "sing"}, "on_divergence"),
        ("nop", {"compiler_options": {"a": 1}}, "is Inductor's"),
    ],
)
def test_misuse(compiler: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(cb.OptionError, match=message):
        aot.checked(compiler, **options)


@pytest.mark.slow
@pytest.mark.ci_sample
@pytest.mark.inductor
def test_inductor() -> None:
    table = decomposition_table("inductor")
    given = inputs()
    with cb.collect() as session:
        train(aot_function(function, aot.checked("inductor"), decompositions=table), *given)
        module = net()
        backend = aot_autograd(fw_compiler=aot.checked("inductor"), decompositions=table)
        compiled = torch.compile(module, backend=backend, dynamic=True)
        for size in (5, 6):  # the saved activations of this net are memory that Inductor would write over
            compiled(torch.randn(size, 4, requires_grad=True)).sum().backward()
        with torch.no_grad():
            compiled(torch.randn(5, 4))
    assert session.report.verdict is cb.Verdict.PASS, str(session.report)
    kinds = {region.name.split(", ")[1].split()[0] for region in session.report.coverage.regions}
    assert kinds == {"forward", "backward", "inference"}


@pytest.mark.inductor
def test_inductor_keeps_the_strides_that_the_user_sees() -> None:
    x = torch.randn(2, 3, 6, 6)
    conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    run = aot_module(conv, aot.checked("inductor"), decompositions=decomposition_table("inductor"))
    with torch.no_grad():
        assert run(x).stride() == aot_module(conv, aot.nop)(x).stride()


def test_writes_to_inputs_are_counted_by_the_caller_of_a_graph() -> None:
    def doubles(x: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        return x + 1

    with cb.collect() as session:
        aot_function(doubles, fw_compiler=aot.checked(faults.forgets_to_count), keep_inference_input_mutations=True)(
            torch.rand(3)
        )
    agreed(session.report)
    assert session.report.coverage.checked["mutated inputs"] == 1


def test_a_backward_graph_in_a_thread_of_the_engine() -> None:
    x, y = inputs()
    compiled = aot_function(function, aot.checked(WRONG_BACKWARD, on_divergence="record"))
    with cb.collect() as session:
        out = compiled(x, y)
        as_the_engine(lambda: out[0].sum().backward())
    assert {finding.graph for finding in session.report.findings} == {"backward"}, str(session.report)
