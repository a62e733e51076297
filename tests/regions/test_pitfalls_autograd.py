"""Ways to run a backward pass, or none: each passes when clean and is caught when wrong just there."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn

import checked_backend as cb
from tests.support import faults
from tests.support.classifier import Classifier, Compile, data
from tests.support.region_tools import agreed, audit, backwards, checked, clean_reports, found, gathered

BOTH = ("python", "aot")


# which outputs receive gradients


def loss_only(loss: torch.Tensor, _logits: torch.Tensor) -> None:
    loss.backward()


def logits_only(_loss: torch.Tensor, logits: torch.Tensor) -> None:
    logits.square().sum().backward()


def both_in_one(loss: torch.Tensor, logits: torch.Tensor) -> None:
    (loss + logits.square().sum()).backward()


def one_after_the_other(loss: torch.Tensor, logits: torch.Tensor) -> None:
    loss.backward(retain_graph=True)
    logits.square().sum().backward()


def twice(loss: torch.Tensor, _logits: torch.Tensor) -> None:
    loss.backward(retain_graph=True)
    loss.backward()


WAYS = {
    "loss only": (loss_only, 1),
    "logits only": (logits_only, 1),
    "both in one pass": (both_in_one, 1),
    "one after the other": (one_after_the_other, 2),
    "twice with retain_graph": (twice, 2),
}


@pytest.mark.parametrize(
    ("name", "reference"), [(name, ("keep", "recompute")[number % 2]) for number, name in enumerate(WAYS)]
)
def test_one_output_feeds_another(name: str, reference: str) -> None:
    """Loss and logits come from one region; the loss is made of the logits."""
    run, passes = WAYS[name]

    def program(compile_: Compile) -> None:
        run(*compile_(Classifier())(*data()))

    for report in clean_reports(program, reference=reference):
        assert backwards(report) == passes
        assert report.coverage.checked["gradients"] == 4 * passes
    report = audit(program, faults.scaled_gradient("hidden.weight", "python"), reference=reference)
    assert found(report) == {("logic", "grad[hidden.weight]")}
    report = audit(program, faults.zeroed_gradient("head.bias", "aot"), reference=reference)
    assert found(report) == {("logic", "grad[head.bias]")}


def test_gradient_of_some_inputs_only() -> None:
    """`torch.autograd.grad` of one parameter: only that gradient is computed, and checked."""

    def program(compile_: Compile) -> None:
        model = Classifier()
        loss, _ = compile_(model)(*data())
        torch.autograd.grad(loss, [model.head.weight])

    for report in clean_reports(program):
        assert report.coverage.checked["gradients"] == 1
    for how in BOTH:
        assert found(audit(program, faults.scaled_gradient("head.weight", how))) == {("logic", "grad[head.weight]")}


def test_gradient_that_is_none() -> None:
    """`unused` is in the region but has no influence on what the backward pass starts from."""

    def program(compile_: Compile) -> None:
        x, unused = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
        used, _other = compile_(lambda x, unused: (x.sin(), unused.exp()))(x, unused)
        used.sum().backward()

    clean_reports(program)
    for how in BOTH:
        assert found(audit(program, faults.scaled_gradient("x", how))) == {("logic", "grad[x]")}
    made_up = faults.spoiled_gradient("unused", torch.ones_like, "aot")
    assert {subject for _detail, subject in found(audit(program, made_up))} == {"grad[unused]"}


def test_frozen_parameters() -> None:
    def program(compile_: Compile) -> None:
        model = Classifier()
        model.hidden.requires_grad_(False)
        compile_(model)(*data())[0].backward()

    for report in clean_reports(program):
        assert report.coverage.checked["gradients"] == 2
    for how in BOTH:
        assert found(audit(program, faults.scaled_gradient("head.bias", how))) == {("logic", "grad[head.bias]")}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("on_divergence", ["record", "fallback"])
def test_a_backward_pass_inside_of_the_compiled_program(on_divergence: str) -> None:
    """Dynamo, which runs it in Python, must not compile the hooks that watch it."""
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        return loss.detach()

    for compiler, findings in ((faults.clean("aot"), set()), (faults.scaled_gradient("0.bias", "aot"), {"0.bias"})):
        torch._dynamo.reset()
        compiled = checked(step, compiler, on_divergence=on_divergence)
        report = gathered(lambda compiled=compiled: compiled(torch.randn(5, 4)))
        assert {subject for _, subject in found(report)} == {f"grad[{name}]" for name in findings}
        assert report.verdict is (cb.Verdict.FAIL if findings else cb.Verdict.PASS)
        assert all("step" in region.name for region in report.coverage.regions), report.coverage.regions
        assert report.coverage.checked["gradients"] == 4


@pytest.mark.parametrize("reference", ["keep", "recompute"])
def test_weights_that_change_before_the_backward_pass(reference: str) -> None:
    """Both must refuse, and do: autograd's own check of versions is no fault of the compiler."""
    weight = torch.randn(4, 4, requires_grad=True)
    x = torch.randn(3, 4, requires_grad=True)

    def program() -> None:
        y = checked(lambda x, w: torch.tanh(x @ w), faults.clean("aot"), reference=reference)(x, weight)
        with torch.no_grad():
            weight.mul_(1.5)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()

    report = gathered(program)
    assert not report.findings
    assert report.verdict is (cb.Verdict.PASS if reference == "keep" else cb.Verdict.INCONCLUSIVE)


@pytest.mark.parametrize("outside", [True, False])
def test_grad_mode_that_the_program_turns_on(outside: bool) -> None:
    def run(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.enable_grad():
            y = (x + 1).sin()
        return y, x * 2

    def program(compile_: Compile) -> None:
        x = torch.randn(5, requires_grad=True)
        with torch.set_grad_enabled(outside):
            y, z = compile_(run)(x)
        assert (y.requires_grad, z.requires_grad) == (True, outside)
        y.sum().backward()

    for report in clean_reports(program):
        assert report.coverage.checked["gradients"] == 1
    for how in BOTH if outside else ("aot",):  # what is planted in Python works with grad mode on
        assert found(audit(program, faults.scaled_gradient("x", how))) == {("logic", "grad[x]")}


def test_a_view_without_history_must_have_none_when_compiled() -> None:
    """What is a view under ``no_grad`` requires grad, as its base does, and leads nowhere."""

    def run(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x.sin()
        with torch.no_grad():
            seen = y.view(-1)
        return y * 2, seen

    def program(compile_: Compile) -> None:
        y, _ = compile_(run)(torch.randn(5, requires_grad=True))
        y.sum().backward()

    assert agreed(audit(program, faults.clean()))
    report = audit(program, faults.clean("aot"))
    if found(report) == {("crash.compiling", "candidate")}:
        pytest.skip("this torch's AOT autograd does not compile such a view")
    assert found(report) == {("structure.requires_grad", "output[1]")}  # AOT autograd gives it a history
    assert (report.findings[0].expected or "").endswith("without a grad_fn")
    assert report.coverage.checked["gradients"] == 1


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_view_without_history_may_be_an_input() -> None:
    base = torch.randn(5, requires_grad=True).sin()
    with torch.no_grad():
        seen = base.view(-1)
    for how in BOTH:
        assert agreed(gathered(lambda how=how: checked(torch.cos, faults.clean(how))(seen)))


def test_outputs_that_need_no_gradient() -> None:
    def run(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.sin(), x.detach() * 2, x.argmax(), (x > 0)

    def program(compile_: Compile) -> None:
        compile_(run)(torch.randn(5, requires_grad=True))[0].sum().backward()

    for report in clean_reports(program):
        assert report.coverage.checked["outputs"] == 4
    for at in range(4):
        assert ("logic", f"output[{at}]") in found(audit(program, faults.wrong_value(at, "aot")))
    detached = faults.spoiled_output(lambda tensor: tensor.detach())
    report = audit(lambda compile_: compile_(run)(torch.randn(5, requires_grad=True)), detached)
    assert found(report) == {("structure.requires_grad", "output[0]")}


def test_second_step_is_checked_too() -> None:
    """A gradient that is wrong from the third pass on."""
    passes: list[int] = []

    def late(gradient: torch.Tensor) -> torch.Tensor:
        passes.append(1)
        return gradient * (1.01 if len(passes) > 2 else 1.0)

    model = Classifier()
    compiled = checked(model, faults.spoiled_gradient("head.weight", late, "aot"))
    assert agreed(gathered(lambda: [compiled(*data())[0].backward() for _ in range(2)]))
    report = gathered(lambda: compiled(*data())[0].backward())
    assert {subject for _detail, subject in found(report)} == {"grad[head.weight]"}


# backward that never comes, or comes again


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
@pytest.mark.parametrize("reference", ["keep", "recompute"])
def test_backward_that_never_comes_keeps_no_memory(compiler: str, reference: str) -> None:
    """When the user drops the outputs, eager's kept activations go too, without the garbage collector's help."""
    compiled = checked(Classifier(), compiler, reference=reference)
    compiled(*data())  # the first call compiles
    saved: list[weakref.ref[torch.Tensor]] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        stands_for = tensor.detach()  # saving a result itself under hooks would be a cycle of torch's own
        saved.append(weakref.ref(stands_for))
        return stands_for

    def alive() -> int:
        return sum(ref() is not None for ref in saved)

    gc.collect()
    gc.disable()
    try:
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            outputs = compiled(*data())
        assert alive()  # activations live as long as the outputs do
        del outputs
        assert alive() == 0
    finally:
        gc.enable()


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_nothing_is_kept_after_backward(compiler: str) -> None:
    def tensors() -> int:
        gc.collect()
        return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())

    compiled = checked(Classifier(), compiler)

    def one_step() -> None:
        compiled(*data())[0].backward()

    for _ in range(2):
        one_step()
    before = tensors()
    for _ in range(5):
        one_step()
    assert tensors() <= before


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_users_saved_tensor_hooks_see_only_the_candidate(compiler: str) -> None:
    """Hooks such as `save_on_cpu` are the user's: eager's own activations do not pass through them."""
    model, (x, target) = Classifier(), data()
    counts = []
    for function in (torch.compile(model, backend=compiler), checked(model, compiler)):
        torch._dynamo.reset()
        seen: list[tuple[int, ...]] = []

        def note(tensor: torch.Tensor, seen: list[tuple[int, ...]] = seen) -> torch.Tensor:
            seen.append(tuple(tensor.shape))
            return tensor.detach()

        function(x, target)
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            function(x, target)[0].backward()
        counts.append(seen)
    assert counts[0]
    assert counts[1] == counts[0]


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_backward_twice_without_retain_graph_raises_as_in_eager(compiler: str) -> None:
    def run() -> None:
        loss, _ = checked(Classifier(), compiler)(*data())
        loss.backward()
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            loss.backward()

    assert not found(gathered(run))


def test_double_backward_is_noted() -> None:
    """Gradients of gradients are not checked, and the coverage says so; they are as in eager."""

    def penalty(function: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        x = torch.linspace(-1, 1, 5, requires_grad=True)
        [gradient] = torch.autograd.grad(function(x).sum(), [x], create_graph=True)
        gradient.square().sum().backward()
        if x.grad is None:
            raise AssertionError
        return x.grad

    def function(x: torch.Tensor) -> torch.Tensor:
        return x.sin() * x

    results = []
    report = gathered(lambda: results.append(penalty(checked(function, "eager"))))
    assert agreed(report)
    assert torch.equal(results[0], penalty(function))
    [skip] = [skip for skip in report.coverage.skipped if skip.subject == "double backward"]
    assert "not checked" in skip.reason
    assert "double backward" in report.to_text(verbose=True)


class RaisesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(_ctx: object, *_gradients: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no kernel")


def raising(gm: torch.fx.GraphModule, _inputs: object) -> Callable[..., object]:
    """A compiler that runs torch operators, one of which raises in the backward pass."""
    return lambda *args: [RaisesInBackward.apply(one) if one.requires_grad else one for one in gm(*args)]


@pytest.mark.parametrize("on_divergence", ["raise", "record", "fallback"])
def test_a_backward_pass_that_a_compiled_operator_ends_is_no_pass(on_divergence: str) -> None:
    x = torch.randn(4, requires_grad=True)
    compiled = checked(lambda x: (x * 2).sin(), raising, on_divergence=on_divergence)

    def run() -> None:
        with pytest.raises(RuntimeError, match="no kernel"):
            compiled(x).sum().backward()

    report = gathered(run)
    assert report.verdict is cb.Verdict.INCONCLUSIVE
    (skip,) = report.coverage.skipped
    assert skip.subject == "the gradients of call 1"
    assert "began and did not end" in skip.reason


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_passes_that_end_leave_nothing_open(compiler: str) -> None:
    x = torch.randn(4, requires_grad=True)
    compiled = checked(lambda x: ((x * 2).sin(), x.cos()), compiler)

    def run() -> None:
        first, second = compiled(x)
        first.sum().backward(retain_graph=True)
        second.sum().backward()
        torch.autograd.grad(sum(compiled(x)).sum(), x)
        loss = compiled(x)[0].sum()
        loss.backward()
        with pytest.raises(RuntimeError, match="a second time"):  # as eager does
            loss.backward()

    report = gathered(run)
    agreed(report)
    assert report.coverage.skipped == ()
