"""Each class of miscompile is found, under the user's name for it and with the right kind; without a fault, nothing."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import checked_backend as cb
from tests.support import faults
from tests.support.faults import Compiler, How
from tests.support.region_tools import agreed, backwards, calls, checked, found, gathered

pytestmark = pytest.mark.smoke  # a fault of each class is found, and a clean program is not accused

BOTH: tuple[How, ...] = ("python", "aot")


class Net(nn.Module):
    """Running statistics, a counter that the user adds to, and an output that is a view of the input."""

    def __init__(self, *, dropout: bool = False) -> None:
        super().__init__()
        noisy = nn.Dropout(0.25) if dropout else nn.Identity()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), noisy, nn.Linear(16, 4))
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.seen.add_(1)
        return self.layers(x), x.t()


def step(
    compiler: Any, *, training: bool = True, backward: bool = True, times: int = 1, dropout: bool = False
) -> cb.Report:
    compiled = checked(Net(dropout=dropout), compiler)

    def run() -> None:
        for _ in range(times):
            with torch.set_grad_enabled(training):
                logits, _view = compiled(torch.randn(6, 8))
            if training and backward:
                logits.square().sum().backward()

    return gathered(run)


@pytest.mark.parametrize("compiler", ["eager", "aot_eager", faults.clean("python"), faults.clean("aot")])
@pytest.mark.parametrize(("training", "dropout"), [(True, True), (False, False)])
def test_clean_compilers_pass(compiler: Any, training: bool, dropout: bool) -> None:
    report = step(compiler, training=training, times=3, dropout=dropout)
    assert agreed(report)
    assert calls(report) == 3
    assert backwards(report) == (3 if training else 0)
    checked_counts = report.coverage.checked
    assert checked_counts["outputs"] == 6
    assert checked_counts["mutated inputs"] == 12  # the statistics, their counter, and `seen`
    assert checked_counts.get("gradients", 0) == (18 if training else 0)


FORWARD: dict[str, tuple[Callable[[How], Compiler], tuple[str, str]]] = {
    "value": (lambda how: faults.wrong_value(0, how), ("logic", "output[0]")),
    "one element": (lambda how: faults.one_element(0, how), ("logic", "output[0]")),
    "dtype": (lambda how: faults.wrong_dtype(0, how), ("structure.dtype", "output[0]")),
    "shape": (lambda how: faults.wrong_shape(0, how), ("structure.shape", "output[0]")),
    "stride": (lambda how: faults.wrong_stride(0, how), ("structure.stride", "output[0]")),
    "nan": (lambda how: faults.made_nan(0, how), ("nonfinite", "output[0]")),
    "mutation dropped": (
        lambda how: faults.dropped_mutation("layers.1.running_mean", how),
        ("mutation.dropped", "mutated[layers.1.running_mean]"),
    ),
    "mutation wrong": (
        lambda how: faults.wrong_mutation("layers.1.running_var", how),
        ("mutation.wrong", "mutated[layers.1.running_var]"),
    ),
    "user's mutation dropped": (
        lambda how: faults.dropped_mutation("seen", how),
        ("mutation.dropped", "mutated[seen]"),
    ),
    "user's mutation wrong": (lambda how: faults.wrong_mutation("seen", how), ("mutation.wrong", "mutated[seen]")),
    "one random number too many": (faults.too_many_random_numbers, ("rng.state", "rng state")),
    "reseeded": (faults.reseeded, ("rng.state", "rng state")),
    "crash when compiling": (faults.crash_when_compiling, ("crash.compiling", "candidate")),
    "crash when running": (faults.crash_when_running, ("crash.running", "candidate")),
}


@pytest.mark.parametrize(("how", "training"), [("python", False), ("aot", True)])
@pytest.mark.parametrize("name", FORWARD)
def test_fault_in_forward(name: str, how: How, training: bool) -> None:
    make, (detail, subject) = FORWARD[name]
    report = step(make(how), training=training, backward=False)
    assert found(report) == {(detail, subject)}
    [finding] = report.findings
    assert str(finding.kind) == detail.partition(".")[0]
    assert report.verdict is (cb.Verdict.PASS if finding.is_layout else cb.Verdict.FAIL)
    assert "Net" in str(report) or "forward" in finding.region


def test_random_numbers_of_the_host_that_eager_draws_too_are_no_finding() -> None:
    @torch.library.custom_op("cb_tests::jittered", mutates_args=())
    def jittered(x: torch.Tensor) -> torch.Tensor:
        return x + random.random() + float(np.random.rand())

    jittered.register_fake(torch.empty_like)
    report = gathered(lambda: checked(lambda x: jittered(x) * 2, faults.clean())(torch.randn(5)))
    assert report.verdict is cb.Verdict.PASS, str(report)


@pytest.mark.parametrize("how", BOTH)
def test_other_random_numbers(how: How) -> None:
    report = step(faults.other_random_numbers(how), dropout=True)
    kinds = {str(finding.kind) for finding in report.findings}
    assert kinds == {"rng"}
    subjects = {finding.subject for finding in report.findings}
    assert "output[0]" in subjects
    assert ("rng.stream", "output[0]") in found(report)


@pytest.mark.parametrize("how", BOTH)
@pytest.mark.parametrize("name", ["layers.0.weight", "layers.1.bias", "layers.4.bias"])
@pytest.mark.parametrize("make", [faults.zeroed_gradient, faults.scaled_gradient])
def test_fault_in_a_gradient(name: str, how: How, make: Callable[..., Compiler]) -> None:
    report = step(make(name, how))
    assert found(report) == {("logic", f"grad[{name}]")}
    assert backwards(report) == 1


@pytest.mark.parametrize("how", BOTH)
def test_faults_beside_dropout(how: How) -> None:
    """Random numbers in the region take nothing away from the evidence."""
    report = step(faults.scaled_gradient("layers.4.bias", how), dropout=True)
    assert found(report) == {("logic", "grad[layers.4.bias]")}
    torch._dynamo.reset()
    report = step(faults.one_element(0, how), dropout=True, backward=False)
    assert found(report) == {("logic", "output[0]")}


@pytest.mark.parametrize("how", BOTH)
@pytest.mark.parametrize(
    ("spoil", "detail"),
    [
        (faults.one_element_changed, "logic"),
        (faults.with_nan, "nonfinite"),
        (lambda gradient: gradient * -1, "logic"),
        (lambda gradient: gradient + 1e-3 * gradient.abs().mean(), "logic"),
    ],
)
def test_ways_to_spoil_a_gradient(spoil: Any, detail: str, how: How) -> None:
    report = step(faults.spoiled_gradient("layers.4.weight", spoil, how))
    assert found(report) == {(detail, "grad[layers.4.weight]")}


def test_gradient_of_the_wrong_structure() -> None:
    report = step(faults.spoiled_gradient("layers.4.weight", lambda gradient: None, "aot"))
    assert found(report) == {("structure.type", "grad[layers.4.weight]")}


def test_lost_alias_with_an_input() -> None:
    report = step(faults.lost_alias(1))
    assert found(report) == {("alias.memory", "output[1]")}
    [finding] = report.findings
    assert finding.kind is cb.Kind.ALIAS
    assert finding.expected == "shared memory: input x"
    assert finding.actual == "separate memory: input x"


def test_lost_alias_between_outputs() -> None:
    def two(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x.sin()
        return y, y[:2]

    assert agreed(gathered(lambda: checked(two, "aot_eager")(torch.randn(4, 3))))
    torch._dynamo.reset()
    report = gathered(lambda: checked(two, faults.lost_alias(1))(torch.randn(4, 3)))
    assert found(report) == {("alias.memory", "output[1]")}
    assert report.findings[0].expected == "shared memory: output[0]"


def test_lost_identity() -> None:
    """A region that returns its input gives back the very object; a view of it is only the same memory."""

    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen += 1  # assigns the attribute, so that the region returns it too
            return x * self.seen

    assert agreed(gathered(lambda: checked(Counter(), "eager")(torch.ones(3))))
    torch._dynamo.reset()
    view = faults.spoiled_output(lambda tensor: tensor.view_as(tensor), 1)
    report = gathered(lambda: checked(Counter(), view)(torch.ones(3)))
    assert found(report) == {("alias.identity", "output[1]")}
    assert report.findings[0].expected == "the same object: input seen"


def test_alias_where_eager_has_none() -> None:
    def double(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    def compiler(_gm: Any, _inputs: Any) -> Callable[..., Any]:
        return lambda x: (x.view(x.shape),)

    report = gathered(lambda: checked(double, compiler)(torch.randn(4, 3)))
    assert found(report) == {("alias.memory", "output[0]")}


@pytest.mark.parametrize(
    ("compiler", "actual"),
    [
        (faults.missing_output(), "tuple of 1"),
        (faults.extra_output(), "tuple of 3"),
        (faults.returns_none(), "NoneType"),
    ],
)
def test_wrong_number_of_outputs(compiler: Compiler, actual: str) -> None:
    report = step(compiler, backward=False)
    assert found(report) == {("structure.outputs", "outputs")}
    assert actual in str(report.findings[0].actual)
    assert "tuple of 2" in str(report.findings[0].expected)


def test_compiler_that_returns_nothing() -> None:
    report = step(faults.not_a_function(), backward=False)
    assert found(report) == {("crash.compiling", "candidate")}
    assert "is a `return` missing?" in report.findings[0].message


@pytest.mark.parametrize("when", ["compiling", "running"])
def test_crash_in_backward(when: Any) -> None:
    """A candidate that fails in backward is a finding of kind crash, not a bare exception of the compiler's."""
    model = Net()
    compiled = checked(model, faults.crash_in_backward(when), on_divergence="raise")
    with pytest.raises(cb.DivergenceError) as caught:
        compiled(torch.randn(6, 8))[0].sum().backward()
    assert {finding.kind for finding in caught.value.report.findings} == {cb.Kind.CRASH}


@pytest.mark.parametrize("name", ["x", "layers.0.weight"])
def test_input_changed_that_eager_leaves_alone(name: str) -> None:
    report = step(faults.unwanted_mutation(name), backward=False, training=False)
    assert ("mutation.unexpected", f"mutated[{name}]") in found(report)
    assert {str(finding.kind) for finding in report.findings} == {"mutation"}


@pytest.mark.parametrize("factor", [-1.0, 2.0])
def test_input_negated_or_doubled_as_a_whole(factor: float) -> None:
    def compiler(gm: Any, _inputs: Any) -> Any:
        def run(x: torch.Tensor) -> Any:
            returned = gm.forward(x)
            x.mul_(factor)
            return returned

        return run

    report = gathered(lambda: checked(torch.sin, compiler)(torch.randn(8, 8)))
    assert found(report) == {("mutation.unexpected", "mutated[args[0]]")}


@pytest.mark.parametrize("name", ["x", "layers.0.weight"])
def test_input_changed_at_a_later_call(name: str) -> None:
    model, x = Net(), torch.randn(6, 8)

    def run() -> None:
        compiled = checked(model, faults.from_call(3, faults.unwanted_mutation(name)))
        with torch.no_grad():
            for _ in range(3):
                compiled(x)

    report = gathered(run)
    assert found(report) == {("mutation.unexpected", f"mutated[{name}]")}
    assert calls(report) == 3


def test_eager_raises_and_the_candidate_does_not() -> None:
    def bad(x: torch.Tensor) -> torch.Tensor:
        return torch.embedding(torch.ones(3, 2), x)

    def compiler(_gm: Any, _inputs: Any) -> Callable[..., Any]:
        return lambda *_args: (torch.ones(1, 2),)

    report = gathered(lambda: checked(bad, compiler)(torch.tensor([7])))
    assert found(report) == {("exception.missing", "candidate")}
    assert report.findings[0].expected == "IndexError"


@pytest.mark.parametrize("on_divergence", ["raise", "record"])
def test_another_exception_is_a_finding_and_the_user_gets_eagers(on_divergence: str) -> None:
    def compiler(_gm: Any, _inputs: Any) -> Callable[..., Any]:
        def run(*_args: Any) -> Any:
            raise RuntimeError("kernel: out of bounds")

        return run

    def program() -> None:
        with pytest.raises(IndexError, match="out of range"):
            checked(bad, compiler, on_divergence=on_divergence)(torch.tensor([7]))

    def bad(x: torch.Tensor) -> torch.Tensor:
        return torch.embedding(torch.ones(3, 2), x)

    report = gathered(program)
    assert found(report) == {("exception.type", "candidate")}
    [finding] = report.findings
    assert (finding.expected or "").startswith("IndexError: ")
    assert finding.actual == "RuntimeError: kernel: out of bounds"


def test_the_same_exception_is_no_finding() -> None:
    def program() -> None:
        with pytest.raises(torch.linalg.LinAlgError):
            checked(torch.linalg.cholesky, faults.clean())(-torch.eye(3))

    report = gathered(program)
    assert not report.findings
    assert not report.coverage.notes


def test_the_same_type_with_other_words_is_told() -> None:
    def compiler(_gm: Any, _inputs: Any) -> Callable[..., Any]:
        def run(*_args: Any) -> Any:
            raise torch.linalg.LinAlgError("something else went wrong")

        return run

    def program() -> None:
        with pytest.raises(torch.linalg.LinAlgError, match="positive-definite"):
            checked(torch.linalg.cholesky, compiler)(-torch.eye(3))

    [note] = gathered(program).coverage.notes
    assert "with other words" in note
    assert "something else went wrong" in note


@pytest.mark.inductor
@pytest.mark.parametrize("face", ["check", "numcheck"])
def test_random_operators_of_inductor_that_do_not_refuse_are_found(face: str) -> None:
    """Of numbers that no distribution has, Inductor's own operator makes something all the same."""
    given = torch.zeros(3), torch.tensor([1.0, -1.0, 2.0])

    def program() -> None:
        with pytest.raises(RuntimeError, match="std >= 0"):
            checked(torch.normal, "inductor")(*given)

    report = cb.check(torch.normal, given) if face == "check" else gathered(program)
    assert found(report) == {("exception.missing", "candidate")}
    assert "draws its own random numbers" in report.findings[0].message


def test_finding_names_the_users_line() -> None:
    report = step(faults.wrong_value(0), backward=False)
    [finding] = report.findings
    assert finding.source is not None
    assert "return self.layers(x), x.t()" in finding.source
    assert "test_faults.py:" in finding.source


def test_backward_that_writes_to_the_gradient_it_is_given() -> None:
    x = torch.randn(6, requires_grad=True)
    given = torch.ones(6)
    report = gathered(lambda: checked(torch.sin, faults.overwritten_cotangent())(x).backward(given))
    assert found(report) == {("mutation.unexpected", "gradient of output[0]")}
    assert x.grad is not None
    torch.testing.assert_close(x.grad, x.detach().cos())  # and the checker's own runs have not changed it
