"""Backward passes that never come, come again or fail; copies and resets; inputs that few programs have."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import fx, nn

import checked_backend as cb
from tests.support import faults
from tests.support.classifier import Classifier, Compile, data
from tests.support.raising import raising
from tests.support.region_tools import agreed, audit, backwards, calls, checked, clean_reports, found, gathered

# Dynamo itself looks at .grad of every input
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
both_compilers = pytest.mark.parametrize("compiler", ["eager", "aot_eager"])


def subjects(report: cb.Report) -> set[str]:
    return {subject for _, subject in found(report)}


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
        assert subjects(report) == {f"grad[{name}]" for name in findings}
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


def test_a_view_without_history_may_be_an_input() -> None:
    base = torch.randn(5, requires_grad=True).sin()
    with torch.no_grad():
        seen = base.view(-1)
    for compiler in ("eager", "aot_eager"):
        agreed(gathered(lambda compiler=compiler: checked(torch.cos, compiler)(seen)))


@pytest.mark.parametrize("returned", [torch.sum, lambda v: v, lambda v: v[1].flip(0), lambda v: v.t()[:, 1:]])
def test_gradients_of_a_mutated_view_also_come_through_its_base(returned: Any) -> None:
    """They pass what was copied to the view, not the view."""

    def double(v: torch.Tensor) -> torch.Tensor:
        v.mul_(2)
        return returned(v)

    def program(compile_: Compile) -> None:
        base = torch.randn(4, 3, requires_grad=True) * 1
        (compile_(double)(base.t()[1:]).sin().sum() + base.sum()).backward()

    assert agreed(audit(program, faults.clean("aot"))).coverage.checked["gradients"] == 1
    assert subjects(audit(program, faults.scaled_gradient("v", "aot"))) == {"grad[v]"}


@pytest.mark.parametrize("taken", [(0, 1), (1, 0), (1, 2), (3, 1)])
@both_compilers
def test_a_history_that_is_written_to_a_view_is_what_its_base_and_other_views_have(
    taken: tuple[int, int], compiler: str
) -> None:
    def written(one: torch.Tensor, other: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        start = other.sum()
        one.add_(w)
        return w.cos() + other.sum() * start

    def program(compile_: Compile) -> None:
        base = torch.randn(12)
        views = base, base[2:5], base[3:9].view(2, 3), base[:0]
        w = torch.randn((), requires_grad=True)
        compile_(written)(views[taken[0]], views[taken[1]], w).backward()

    assert not agreed(audit(program, compiler)).coverage.skipped
    assert subjects(audit(program, faults.scaled_gradient("w"))) == {"grad[w]"}


@pytest.mark.parametrize("taken", [(1, 0), (1, 2)])
@both_compilers
def test_gradients_of_views_of_one_tensor_are_not_compared_and_accuse_nobody(
    taken: tuple[int, int], compiler: str
) -> None:
    def written(v: torch.Tensor, other: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        v.add_(w)
        return other.square().sum() + v.sum()

    def program(compile_: Compile) -> None:
        base = torch.randn(4, 3, requires_grad=True) * 1
        views = base, base[1:3], base.t()
        compile_(written)(views[taken[0]], views[taken[1]], torch.randn(3, requires_grad=True)).backward()

    report = audit(program, compiler)
    assert (report.verdict, report.findings) == (cb.Verdict.INCONCLUSIVE, ())
    assert "a mutated input that shares memory with another input" in str(report)
    assert "grad[w]" in subjects(audit(program, faults.scaled_gradient("w")))


def test_views_that_nothing_is_written_to_are_leaves_where_effects_are_unknown() -> None:
    def body(a: torch.Tensor, b: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.cond(w.sum() > 0, torch.sin, torch.cos, (w,)) + a * b.sin()

    def program(compile_: Compile) -> None:
        rows = torch.randn(3, 4, requires_grad=True) * 1
        compile_(body)(rows[0], rows[2], torch.randn(4, requires_grad=True)).sum().backward()

    for report in clean_reports(program):
        assert report.coverage.checked["gradients"] == 3


def test_a_view_whose_data_was_swapped_is_none() -> None:
    def written(v: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
        v.add_(1)
        u.mul_(2)
        return v.sin() + u

    def program(compile_: Compile) -> None:
        base = torch.randn(3, 4)
        v, u = base[1], base[2]
        u.data = torch.randn(4)
        compile_(written)(v, u)

    clean_reports(program)


@pytest.mark.parametrize("word", ["add_", "mul_", "copy_"])
def test_a_gradient_that_comes_through_a_base_that_is_no_input_accuses_nobody(word: str) -> None:
    """It is not seen, but by AOT autograd, which copies what it writes."""

    def written(v: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        getattr(v, word)(w.sin())
        return v + w

    def program(compile_: Compile) -> None:
        base = torch.randn(4, 3)
        v = base[1:3]
        torch.cat([compile_(written)(v, torch.randn(2, 3, requires_grad=True)), v.cos(), base.sin()]).sum().backward()

    report = audit(program, "eager")
    assert report.verdict is cb.Verdict.INCONCLUSIVE
    assert "gradients may come through that tensor" in report.coverage.skipped[-1].reason
    if word != "mul_":  # which is refused
        assert agreed(audit(program, "aot_eager"))


# backward that never comes, or comes again


@both_compilers
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


@both_compilers
def test_nothing_is_kept_after_backward(compiler: str) -> None:
    def tensors() -> int:
        gc.collect()
        return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())

    compiled = checked(Classifier(), compiler)
    for _ in range(2):
        compiled(*data())[0].backward()
    before = tensors()
    for _ in range(5):
        compiled(*data())[0].backward()
    assert tensors() <= before


@both_compilers
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
    assert counts[1] == counts[0] != []


class TwoWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.a + x.exp() * self.b).sum()


@pytest.mark.parametrize("on_divergence", ["record", "fallback"])
@pytest.mark.parametrize(
    ("name", "wrong"), [("", set()), ("a", {"grad[b]"}), ("b", {"grad[b]"}), ("crash", {"candidate"})]
)
def test_a_model_that_ties_weights_runs_what_was_compiled_for_one_that_does_not(
    name: str, wrong: set[str], on_divergence: str
) -> None:
    """Dynamo does not guard that parameters differ: the region is given one tensor twice, whose gradient is a sum."""
    free, tied, x = TwoWeights(), TwoWeights(), torch.arange(4.0)
    tied.b = tied.a
    faulty = faults.crash_in_backward() if name == "crash" else faults.scaled_gradient(name, "aot")
    late = faults.on_data(lambda args: len({*map(id, args)}) < len(args), faulty)
    compiler = late if name else faults.clean("aot")

    def run() -> None:
        for model in (free, tied):
            checked(model, compiler, on_divergence=on_divergence)(x).backward()

    report = gathered(run)
    assert subjects(report) == wrong
    assert report.verdict is (cb.Verdict.FAIL if name else cb.Verdict.PASS)
    if on_divergence == "fallback" or name in ("", "crash"):
        torch.testing.assert_close(tied.a.grad, x + x.exp())


def test_saved_tensor_hooks_that_lose_digits_leave_gradients_undecided() -> None:
    """Eager and the compiled program save other tensors, so such hooks change other gradients."""
    model, hooks = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)), torch.autograd.graph.saved_tensors_hooks
    for compiler in ("aot_eager", faults.scaled_gradient("2.weight", "aot")):
        compiled = checked(model, compiler)
        with cb.collect() as session, hooks(lambda tensor: tensor.bfloat16(), lambda tensor: tensor.float()):
            compiled(torch.randn(6, 8)).square().sum().backward()
        found = {finding.subject for finding in session.report.findings}
        assert found == (set() if compiler == "aot_eager" else {"grad[2.weight]"})
        assert any("passed through hooks" in skip.reason for skip in session.report.coverage.skipped)


def test_double_backward_is_noted() -> None:
    """Gradients of gradients are not checked, and the coverage says so; they are as in eager."""

    def penalty(function: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        x = torch.linspace(-1, 1, 5, requires_grad=True)
        [gradient] = torch.autograd.grad(function(x).sum(), [x], create_graph=True)
        gradient.square().sum().backward()
        assert x.grad is not None
        return x.grad

    def function(x: torch.Tensor) -> torch.Tensor:
        return x.sin() * x

    results = []
    report = agreed(gathered(lambda: results.append(penalty(checked(function, "eager")))))
    assert torch.equal(results[0], penalty(function))
    [skip] = [skip for skip in report.coverage.skipped if skip.subject == "double backward"]
    assert "not checked" in skip.reason
    assert "double backward" in report.to_text(verbose=True)


@pytest.mark.parametrize("on_divergence", ["raise", "record", "fallback"])
def test_a_backward_pass_that_a_compiled_operator_ends_is_no_pass(on_divergence: str) -> None:
    no_kernel = raising(RuntimeError("no kernel"))
    raises = faults.every_output(lambda one: faults.SpoilGradient.apply(one, no_kernel) if one.requires_grad else one)
    x = torch.randn(4, requires_grad=True)
    compiled = checked(lambda x: (x * 2).sin(), raises, on_divergence=on_divergence)

    def run() -> None:
        with pytest.raises(RuntimeError, match="no kernel"):
            compiled(x).sum().backward()

    report = gathered(run)
    assert report.verdict is cb.Verdict.INCONCLUSIVE
    (skip,) = report.coverage.skipped
    assert skip.subject == "the gradients of call 1"
    assert "began and did not end" in skip.reason


@both_compilers
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

    assert agreed(gathered(run)).coverage.skipped == ()


def test_wrong_symbolic_output() -> None:
    """A SymInt among a region's outputs is compared as a value."""

    def program(compile_: Compile) -> None:
        def run(x: torch.Tensor) -> torch.Tensor:
            size = x.shape[0] * 2
            torch._dynamo.graph_break()
            return x.new_ones(size)

        compile_(run, dynamic=True)(torch.randn(3, 2))

    clean_reports(program)
    report = audit(program, faults.every_output(lambda value: value + 1 if isinstance(value, int) else value))
    assert set() < {detail for detail, _ in found(report)} <= {"structure.value", "structure.shape"}


def test_strides_of_empty_tensors_mean_nothing() -> None:
    other = faults.spoiled_output(lambda tensor: tensor.as_strided((0, 3), (17, 5)))
    assert found(audit(lambda compile_: compile_(lambda x: x * 2)(torch.randn(0, 3)), other)) == set()


def zeros_without_memory(count: int) -> torch.Tensor:
    """The gradient of ``sgn``, of which torch stores nothing."""
    x = torch.ones(count, requires_grad=True)
    [zeros] = torch.autograd.grad(torch.sgn(x).sum(), x)
    with pytest.raises(RuntimeError):
        zeros.numpy()
    return zeros


@pytest.mark.parametrize("count", [5, 1 << 17])
def test_zeros_without_memory_given_and_as_gradient(count: int) -> None:
    """Reading their memory would end the process."""

    def function(x: torch.Tensor, zeros: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.sgn(x), x.detach() + zeros, zeros.cos()

    def program(compile_: Compile) -> None:
        run = compile_(function)
        for _ in range(3):
            run(torch.randn(count, requires_grad=True), zeros_without_memory(count))[0].sum().backward()

    for report in clean_reports(program):
        assert report.coverage.checked["gradients"] == 3
    assert ("logic", "output[2]") in found(audit(program, faults.wrong_value(2)))
    assert found(audit(program, faults.spoiled_gradient("x", lambda grad: grad + 0.5))) == {("logic", "grad[x]")}
    given = torch.randn(count, requires_grad=True), zeros_without_memory(count)
    assert agreed(cb.check(function, given, compiler="aot_eager")).coverage.checked["gradients"] == 1
    seen: list[torch.Tensor] = []

    def watching(gm: fx.GraphModule, _example_inputs: Sequence[Any]) -> Callable[..., Any]:
        return lambda *args: (seen.extend(args), gm.forward(*args))[1]

    agreed(cb.check(lambda zeros: zeros.cos(), (zeros_without_memory(count),), compiler=watching))
    for given_to_candidate in seen:  # compilers do not expect them
        with pytest.raises(RuntimeError):
            given_to_candidate.numpy()
    assert seen


class Broken(nn.Module):
    """Two regions, with a Python print between them in the user's program."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x).tanh()
        torch._dynamo.graph_break()
        return self.second(hidden)


def two_regions(compile_: Compile) -> None:
    compile_(Broken())(torch.randn(6, 4)).square().sum().backward()


def test_graph_break() -> None:
    for report in clean_reports(two_regions):
        assert len(report.coverage.regions) == 2
        assert calls(report) == backwards(report) == 2
        assert report.coverage.checked["gradients"] == 5  # 4 parameters, and what passes between the regions


@pytest.mark.parametrize("how", ["python", "aot"])
@pytest.mark.parametrize("region", [0, 1])
def test_fault_in_one_region_of_two(region: int, how: Any) -> None:
    """The finding names the region and the user's line in it."""
    name = ("first", "second")[region]
    wrong = faults.scaled_gradient(f"{name}.weight", how)

    def in_one(gm: Any, inputs: Any) -> Any:
        has = any(name in node.name for node in gm.graph.find_nodes(op="placeholder"))
        return (wrong if has else faults.clean(how))(gm, inputs)

    report = audit(two_regions, in_one)
    assert found(report) == {("logic", f"grad[{name}.weight]")}
    [finding] = report.findings
    assert ("hidden = self.first(x).tanh()", "return self.second(hidden)")[region] in (finding.source or "")


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.norm(x))


def test_deepcopied_compiled_model() -> None:
    compiled = checked(Small(), "aot_eager")
    x = torch.randn(3, 4)
    compiled(x)
    duplicate = copy.deepcopy(compiled)
    report = agreed(gathered(lambda: duplicate(x).sum().backward()))
    assert calls(report) == backwards(report) == 1
    assert [p.grad for p in compiled.parameters()] == [None] * 4

    torch._dynamo.reset()
    wrong = copy.deepcopy(checked(Small(), faults.scaled_gradient("linear.weight", "aot")))
    assert ("logic", "grad[linear.weight]") in found(gathered(lambda: wrong(x).square().sum().backward()))


def test_compiled_in_place() -> None:
    """`model.compile()` instead of `torch.compile(model)`."""
    model = Small()
    options = {"compiler": faults.scaled_gradient("linear.weight"), "on_divergence": "record", "localize": False}
    model.compile(backend="numcheck", options=options)
    assert found(gathered(lambda: model(torch.randn(3, 4)).square().sum().backward())) == {
        ("logic", "grad[linear.weight]")
    }


def test_dynamo_reset() -> None:
    """What was compiled before a reset is checked anew after it, also when its graph is still alive."""
    compiled = checked(Small(), faults.scaled_gradient("linear.weight", "aot"))
    for _ in range(2):
        report = gathered(lambda: compiled(torch.randn(3, 4)).square().sum().backward())
        assert ("logic", "grad[linear.weight]") in found(report)
        assert calls(report) == 1
        torch._dynamo.reset()
    with cb.collect() as session:
        outputs = compiled(torch.randn(3, 4))
        torch._dynamo.reset()
        outputs.square().sum().backward()
    assert ("logic", "grad[linear.weight]") in found(session.report)


def test_powers_of_negative_numbers() -> None:
    """FX's own code for them has another sign, which is what torch's backend ``eager`` runs."""
    returned = []

    def program(compile_: Compile) -> None:
        x = torch.arange(1.0, 5.0, requires_grad=True)
        returned[:] = compile_(lambda x: ((-2.0) ** x.detach(), (-3) ** x.detach() + x))(x)
        returned[1].sum().backward()

    assert agreed(audit(program, "aot_eager")).coverage.checked["outputs"] == 2
    assert returned[0].tolist() == [-2.0, 4.0, -8.0, 16.0]
    assert ("logic", "output[0]") in found(audit(program, faults.wrong_value(0)))
    assert found(audit(program, "eager", on_divergence="fallback")) == {("logic", "output[0]"), ("logic", "output[1]")}
    assert returned[0].tolist() == [-2.0, 4.0, -8.0, 16.0]  # eager's, not what FX's code computes


def test_what_comes_through_the_base_of_a_view_that_is_written_to_accuses_nobody() -> None:
    def copied(view: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        view.copy_(y)
        return view.sum() + y.sum()

    x, y = torch.randn(4, 3, requires_grad=True), torch.randn(3, requires_grad=True)
    base = x * 1
    report = gathered(lambda: (checked(copied, "eager")(base[1], y) + (base * base).sum()).backward())
    assert (report.verdict, report.findings) == (cb.Verdict.INCONCLUSIVE, ())
