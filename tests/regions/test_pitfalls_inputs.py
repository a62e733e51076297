"""What regions do to their inputs, and what inputs can be: clean passes, a fault planted just there is found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import fx, nn

import checked_backend as cb
from tests.support import faults
from tests.support.region_tools import agreed, audit, backwards, clean_reports, found

Compile = Callable[..., Any]

# Dynamo itself looks at .grad of every input
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


# mutation


def batch_norm(compile_: Compile) -> None:
    model = compile_(nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6)))
    for _ in range(2):
        model(torch.randn(5, 4)).square().sum().backward()


def user_adds(compile_: Compile) -> None:
    def run(x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return x * 2

    compile_(run)(torch.randn(4, 3))


def user_writes_a_view(compile_: Compile) -> None:
    def run(x: torch.Tensor) -> torch.Tensor:
        x[1:3, 0].mul_(3)
        return x.sum()

    compile_(run)(torch.randn(4, 3))


def base_and_view(compile_: Compile) -> None:
    """One storage passed twice; writing through one shows in the other."""

    def run(base: torch.Tensor, view: torch.Tensor) -> torch.Tensor:
        view.add_(5)
        return base * 2

    base = torch.randn(4, 3)
    compile_(run)(base, base[1:3])


def user_writes_a_strided_slice(compile_: Compile) -> None:
    def run(x: torch.Tensor) -> torch.Tensor:
        return x.mul_(2).sum()

    compile_(run)(torch.randn(6, 8)[::2, 1::3])


@pytest.mark.parametrize(
    ("program", "mutated", "name", "how"),
    [
        (batch_norm, 6, "1.running_mean", "python"),
        (batch_norm, 6, "1.running_var", "aot"),
        (batch_norm, 6, "1.num_batches_tracked", "python"),
        (user_adds, 1, "x", "aot"),
        (user_writes_a_view, 1, "x", "python"),
        (user_writes_a_strided_slice, 1, "x", "aot"),
    ],
)
def test_inputs_changed_in_place(program: Any, mutated: int, name: str, how: Any) -> None:
    for report in clean_reports(program):
        assert report.coverage.checked["mutated inputs"] == mutated
    report = audit(program, faults.dropped_mutation(name, how))
    assert ("mutation.dropped", f"mutated[{name}]") in found(report)
    report = audit(program, faults.wrong_mutation(name, how))
    assert ("mutation.wrong", f"mutated[{name}]") in found(report)


def test_one_storage_passed_twice() -> None:
    for report in clean_reports(base_and_view):
        assert report.coverage.checked["mutated inputs"] == 2  # both change, though one is written to
    for how in ("python", "aot"):
        assert ("logic", "output[0]") in found(audit(base_and_view, faults.wrong_value(0, how)))

    def lost(_gm: Any, _inputs: Any) -> Any:
        return lambda base, view: (base * 2,)

    wrong = found(audit(base_and_view, lost))
    assert ("mutation.dropped", "mutated[base]") in wrong
    assert ("mutation.dropped", "mutated[view]") in wrong


def test_one_tensor_passed_twice() -> None:
    def program(compile_: Compile) -> None:
        def run(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            x.add_(1)
            return x * y

        x = torch.randn(3)
        compile_(run)(x, x)

    clean_reports(program)
    assert ("mutation.dropped", "mutated[x]") in found(audit(program, faults.dropped_mutation("x")))


def test_mutated_input_that_requires_grad_and_is_no_leaf() -> None:
    def program(compile_: Compile) -> None:
        def run(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            x.add_(w * 2)  # x.mul_(w) would need x from before, which AOT autograd does not keep
            return x.sin()

        w = torch.randn(3, requires_grad=True)
        start = torch.randn(4, 3, requires_grad=True)
        x = start * 1.0
        y = compile_(run)(x, w)
        (y.sum() + (x * x).sum()).backward()  # gradients arrive at the output and at the mutated input

    for report in clean_reports(program):
        assert backwards(report) == 1
        assert report.coverage.checked["gradients"] == 2
    for name in ("w", "x"):
        assert found(audit(program, faults.scaled_gradient(name, "aot"))) == {("logic", f"grad[{name}]")}
    assert found(audit(program, faults.scaled_gradient("w"))) == {("logic", "grad[w]")}
    for how in ("python", "aot"):
        assert ("mutation.wrong", "mutated[x]") in found(audit(program, faults.wrong_mutation("x", how)))


def test_gradient_only_through_the_mutated_input() -> None:
    def program(compile_: Compile) -> None:
        def run(x: torch.Tensor, w: torch.Tensor) -> None:
            x.add_(w * 2)

        w = torch.randn(3, requires_grad=True)
        x = torch.randn(4, 3, requires_grad=True) * 1.0
        compile_(run)(x, w)
        x.square().sum().backward()

    for report in clean_reports(program):
        assert backwards(report) == 1
        assert report.coverage.checked["gradients"] == 2
    assert found(audit(program, faults.scaled_gradient("w", "aot"))) == {("logic", "grad[w]")}
    assert found(audit(program, faults.scaled_gradient("w"))) == {("logic", "grad[w]")}


# aliases


def views_of_an_input(compile_: Compile) -> None:
    compile_(lambda x: (x[1:], x.t(), x * 2))(torch.randn(4, 3))


def views_of_one_result(compile_: Compile) -> None:
    def run(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x.sin()
        return y, y.view(-1), y[0]

    compile_(run)(torch.randn(4, 3, requires_grad=True))


@pytest.mark.parametrize(("program", "at"), [(views_of_an_input, 0), (views_of_an_input, 1), (views_of_one_result, 1)])
def test_outputs_that_alias(program: Any, at: int) -> None:
    for report in clean_reports(program):
        assert report.coverage.checked["outputs"] == 3
    assert ("alias.memory", f"output[{at}]") in found(audit(program, faults.lost_alias(at)))


def test_gradients_through_outputs_that_alias_an_input() -> None:
    def program(compile_: Compile) -> None:
        x = torch.randn(4, 3, requires_grad=True)
        view, product = compile_(lambda x: (x.t(), x * 3))(x)
        (view.square().sum() + product.sum()).backward()

    for report in clean_reports(program):
        assert backwards(report) == 1
    assert ("logic", "grad[x]") in found(audit(program, faults.scaled_gradient("x", "aot")))
    assert ("logic", "grad[x]") in found(audit(program, faults.scaled_gradient("x")))


# what an input can be


def test_inputs_that_are_no_tensors() -> None:
    def run(x: torch.Tensor, scale: float, times: int, names: list[str], flag: bool) -> tuple[torch.Tensor, int, str]:
        for _ in range(times):
            x = x * scale
        return (-x if flag else x), times, names[0]

    def program(compile_: Compile) -> None:
        compiled = compile_(run)
        for scale in (0.5, 0.25, 0.125):
            if compiled(torch.randn(3), scale, 2, ["a"], True)[1:] != (2, "a"):
                raise AssertionError

    for report in clean_reports(program):
        assert report.coverage.checked["outputs"] == 3
    assert found(audit(program, faults.wrong_value())) == {("logic", "output[0]")}


def test_sizes_that_are_symbols() -> None:
    def run(x: torch.Tensor, times: int) -> tuple[torch.Tensor, int]:
        return x.reshape(-1) * times, x.shape[0] * times

    def program(compile_: Compile) -> None:
        compiled = compile_(run, dynamic=True)
        for rows, times in ((2, 3), (5, 4), (7, 9)):
            if compiled(torch.randn(rows, 3), times)[1] != rows * times:
                raise AssertionError

    for report in clean_reports(program):
        [region] = report.coverage.regions
        assert region.checked_calls == 3
    regions = {finding.region for finding in audit(program, faults.wrong_value(0)).findings}
    assert len(regions) == 1


def test_wrong_symbolic_output() -> None:
    """A SymInt among a region's outputs is compared as a value."""

    def program(compile_: Compile) -> None:
        def run(x: torch.Tensor) -> torch.Tensor:
            size = x.shape[0] * 2
            torch._dynamo.graph_break()
            return x.new_ones(size)

        compile_(run, dynamic=True)(torch.randn(3, 2))

    clean_reports(program)

    def wrong(gm: Any, _inputs: Any) -> Any:
        def run(*args: Any) -> Any:
            return tuple(value + 1 if isinstance(value, int) else value for value in gm.forward(*args))

        return run

    report = audit(program, wrong)
    integers = {detail for detail, _subject in found(report)}
    assert integers <= {"structure.value", "structure.shape"}
    assert integers


def test_input_that_requires_grad_and_is_no_leaf() -> None:
    def program(compile_: Compile) -> None:
        first, w = torch.randn(4, 3, requires_grad=True), torch.randn(3, requires_grad=True)
        hidden = first * 2
        hidden.retain_grad()
        compile_(lambda x, w: (x * w).tanh())(hidden, w).sum().backward()
        if first.grad is None or hidden.grad is None:
            raise AssertionError

    for report in clean_reports(program):
        assert report.coverage.checked["gradients"] == 2
    for how in ("python", "aot"):
        assert found(audit(program, faults.zeroed_gradient("x", how))) == {("logic", "grad[x]")}


def test_two_inputs_that_are_results_of_one_node() -> None:
    def program(compile_: Compile) -> None:
        halves = torch.randn(4, 6, requires_grad=True).chunk(2, dim=1)
        compile_(lambda left, right: left.exp() * right)(*halves).sum().backward()

    for report in clean_reports(program):
        assert report.coverage.checked["gradients"] == 2
    for how in ("python", "aot"):
        assert found(audit(program, faults.scaled_gradient("right", how))) == {("logic", "grad[right]")}


# dtypes and shapes


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex(dtype: torch.dtype) -> None:
    def program(compile_: Compile) -> None:
        x = torch.randn(4, 3, dtype=dtype, requires_grad=True)
        compile_(lambda x: (x * x.conj()) + x.exp())(x).abs().sum().backward()

    for report in clean_reports(program):
        assert report.coverage.checked["gradients"] == 1
    assert found(audit(program, faults.one_element(0, "python"))) >= {("logic", "output[0]")}
    assert found(audit(program, faults.scaled_gradient("x", "aot"))) == {("logic", "grad[x]")}


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bool])
def test_exact_dtypes(dtype: torch.dtype) -> None:
    def program(compile_: Compile) -> None:
        x = torch.randint(0, 2, (4, 3)).to(dtype)
        compile_(lambda x: (x | x.flip(0), x.sum()))(x)

    for report in clean_reports(program):
        assert report.coverage.checked["tensors"] == 2
    for at, how in enumerate(("python", "aot")):
        assert found(audit(program, faults.one_element(at, how))) == {("logic", f"output[{at}]")}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_floating_dtypes(dtype: torch.dtype) -> None:
    def program(compile_: Compile) -> None:
        x = torch.randn(8, 8, dtype=dtype, requires_grad=True)
        compile_(lambda x: (x @ x).tanh().sum(0))(x).sum().backward()

    for report in clean_reports(program):
        assert report.coverage.checked["gradients"] == 1
    assert ("logic", "output[0]") in found(audit(program, faults.wrong_value(0, "aot")))
    assert found(audit(program, faults.zeroed_gradient("x", "python"))) == {("logic", "grad[x]")}


def test_empty_tensors() -> None:
    def program(compile_: Compile) -> None:
        x = torch.randn(0, 3, requires_grad=True)
        compile_(lambda x: (x * 2, x.sum(), x.new_zeros(2, 0)))(x)[1].backward()

    for report in clean_reports(program):
        assert report.coverage.checked["outputs"] == 3
        assert backwards(report) == 1
    assert found(audit(program, faults.wrong_shape(0))) == {("structure.shape", "output[0]")}
    assert found(audit(program, faults.wrong_dtype(2))) == {("structure.dtype", "output[2]")}
    assert ("logic", "output[1]") in found(audit(program, faults.wrong_value(1)))


def test_strides_of_empty_tensors_mean_nothing() -> None:
    def program(compile_: Compile) -> None:
        compile_(lambda x: x * 2)(torch.randn(0, 3))

    other = faults.spoiled_output(lambda tensor: tensor.as_strided((0, 3), (17, 5)))
    assert found(audit(program, other)) == set()


def test_tensors_without_dimensions() -> None:
    def program(compile_: Compile) -> None:
        x, w = torch.tensor(3.0, requires_grad=True), torch.tensor(2.0, requires_grad=True)
        compile_(lambda x, w: (x * w).sin())(x, w).backward()

    for report in clean_reports(program):
        assert report.coverage.checked["gradients"] == 2
    for how in ("python", "aot"):
        assert ("logic", "output[0]") in found(audit(program, faults.wrong_value(0, how)))
        assert found(audit(program, faults.scaled_gradient("w", how))) == {("logic", "grad[w]")}


def test_expanded_and_permuted_inputs() -> None:
    def program(compile_: Compile) -> None:
        wide = torch.randn(4, 1, requires_grad=True).expand(4, 5)
        across = torch.randn(5, 4, requires_grad=True).t()
        compile_(lambda a, b: a * b)(wide, across).sum().backward()

    for report in clean_reports(program):
        assert report.coverage.checked["gradients"] == 2
    for how in ("python", "aot"):
        assert found(audit(program, faults.scaled_gradient("a", how))) == {("logic", "grad[a]")}
        assert ("structure.stride", "output[0]") in found(audit(program, faults.wrong_stride(0, how)))


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

    def program(compile_: Compile) -> None:
        run = compile_(lambda x, zeros: (torch.sgn(x), x.detach() + zeros, zeros.cos()))
        for _ in range(3):
            run(torch.randn(count, requires_grad=True), zeros_without_memory(count))[0].sum().backward()

    for report in clean_reports(program):
        assert report.coverage.checked["gradients"] == 3
    assert ("logic", "output[2]") in found(audit(program, faults.wrong_value(2)))
    assert found(audit(program, faults.spoiled_gradient("x", lambda grad: grad + 0.5))) == {("logic", "grad[x]")}
    given = torch.randn(count, requires_grad=True), zeros_without_memory(count)
    whole = cb.check(lambda x, zeros: (torch.sgn(x), x.detach() + zeros, zeros.cos()), given, compiler="aot_eager")
    assert agreed(whole)
    assert whole.coverage.checked["gradients"] == 1
    seen: list[torch.Tensor] = []

    def watching(gm: fx.GraphModule, _example_inputs: Sequence[Any]) -> Callable[..., Any]:
        return lambda *args: (seen.extend(args), gm.forward(*args))[1]

    agreed(cb.check(lambda zeros: zeros.cos(), (zeros_without_memory(count),), compiler=watching))
    for given_to_candidate in seen:  # compilers do not expect them
        with pytest.raises(RuntimeError):
            given_to_candidate.numpy()
    assert seen
