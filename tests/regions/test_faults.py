"""Each class of miscompile is found, under the user's name for it and with the right kind; without a fault, nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import checked_backend as cb
from tests import ledger
from tests.ledger.answer import differences, read
from tests.ledger.sources import planted
from tests.ledger.sources.planted import Net
from tests.support import faults
from tests.support.raising import raising
from tests.support.region_tools import agreed, backwards, calls, checked, found, gathered

pytestmark = pytest.mark.smoke  # a fault of each class is found, and a clean program is not accused

BOTH: tuple[faults.How, ...] = ("python", "aot")


def step(compiler: Any, *, training: bool = True, backward: bool = True, times: int = 1) -> cb.Report:
    compiled = checked(Net(), compiler)

    def run() -> None:
        for _ in range(times):
            with torch.set_grad_enabled(training):
                logits, _view = compiled(torch.randn(6, 8))
            if training and backward:
                logits.square().sum().backward()

    return gathered(run)


@pytest.mark.parametrize("compiler", ["eager", "aot_eager", faults.clean("python"), faults.clean("aot")])
@pytest.mark.parametrize("training", [True, False])
def test_clean_compilers_pass(compiler: Any, training: bool) -> None:
    report = agreed(step(compiler, training=training, times=3))
    assert calls(report) == 3
    assert backwards(report) == (3 if training else 0)
    checked_counts = report.coverage.checked
    assert checked_counts["outputs"] == 6
    assert checked_counts["mutated inputs"] == 12  # the statistics, their counter, and `seen`
    assert checked_counts.get("gradients", 0) == (18 if training else 0)


ANSWERS = read(Path(ledger.__file__).with_name("answers.json"))


@pytest.mark.parametrize(("name", "make"), [pytest.param(*one, id=one[0]) for one in planted.compilers()])
def test_each_fault_has_the_answer_of_the_ledger(name: str, make: Callable[[], faults.Compiler]) -> None:
    asked = f"faults/{name}/float32::numcheck"
    assert not [*differences({asked: ANSWERS[asked]}, {asked: planted.trained(make())})]


@pytest.mark.parametrize("how", BOTH)
def test_a_gradient_that_is_off_by_little_everywhere(how: faults.How) -> None:
    spoiled = faults.spoiled_gradient("layers.4.weight", lambda grad: grad + 1e-3 * grad.abs().mean(), how)
    assert found(step(spoiled)) == {("logic", "grad[layers.4.weight]")}


def test_what_a_finding_of_structure_says() -> None:
    [finding] = step(faults.lost_alias(1)).findings
    assert (finding.expected, finding.actual) == ("shared memory: input x", "separate memory: input x")
    for compiler, actual in ((faults.missing_output(), "tuple of 1"), (faults.returns_none(), "NoneType")):
        torch._dynamo.reset()
        [finding] = step(compiler, backward=False).findings
        assert actual in str(finding.actual)
        assert "tuple of 2" in str(finding.expected)
    torch._dynamo.reset()
    [finding] = step(faults.not_a_function(), backward=False).findings
    assert "is a `return` missing?" in finding.message
    torch._dynamo.reset()
    [finding] = step(faults.wrong_value(0), backward=False).findings
    assert "return self.layers(x), x.t()" in str(finding.source)
    assert "planted.py:" in str(finding.source)


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


@pytest.mark.parametrize("alias", [lambda x: x.view(x.shape), lambda x: torch.from_numpy(x.numpy())])
def test_alias_where_eager_has_none(alias: Callable[[torch.Tensor], torch.Tensor]) -> None:
    compiler = faults.run_in_python(lambda _gm: lambda _results, args: [alias(*args)])
    assert found(gathered(lambda: checked(torch.clone, compiler)(torch.randn(4, 3)))) == {("alias.memory", "output[0]")}


@pytest.mark.parametrize("when", ["compiling", "running"])
def test_crash_in_backward(when: Any) -> None:
    """A candidate that fails in backward is a finding of kind crash, not a bare exception of the compiler's."""
    compiled = checked(Net(), faults.crash_in_backward(when), on_divergence="raise")
    with pytest.raises(cb.DivergenceError) as caught:
        compiled(torch.randn(6, 8))[0].sum().backward()
    assert {finding.kind for finding in caught.value.report.findings} == {cb.Kind.CRASH}


@pytest.mark.parametrize(
    "change",
    [torch.Tensor.neg_, lambda x: x.mul_(2), torch.Tensor.t_, torch.Tensor.requires_grad_, lambda x: x.unsqueeze_(0)],
)
def test_an_input_that_is_changed_as_a_whole(change: Callable[[torch.Tensor], Any]) -> None:
    compiler = faults.run_in_python(lambda _gm: lambda results, args: (results, change(*args))[0])
    report = gathered(lambda: checked(torch.sin, compiler)(torch.randn(8, 8)))
    assert found(report) == {("mutation.unexpected", "mutated[args[0]]")}


def test_a_result_of_inference_mode() -> None:
    """Autograd refuses it."""
    x, compiled = torch.randn(8, 8), checked(torch.sin, lambda gm, _inputs: torch.inference_mode()(gm.forward))
    assert found(gathered(lambda: compiled(x))) == {("structure.inference", "output[0]")}
    torch._dynamo.reset()
    with torch.inference_mode():
        assert agreed(gathered(lambda: compiled(x)))


def test_input_changed_at_a_later_call() -> None:
    model, x = Net(), torch.randn(6, 8)

    def run() -> None:
        compiled = checked(model, faults.from_call(3, faults.unwanted_mutation("x")))
        with torch.no_grad():
            for _ in range(3):
                compiled(x)

    report = gathered(run)
    assert found(report) == {("mutation.unexpected", "mutated[x]")}
    assert calls(report) == 3


def bad(x: torch.Tensor) -> torch.Tensor:
    return torch.embedding(torch.ones(3, 2), x)


def test_eager_raises_and_the_candidate_does_not() -> None:
    report = gathered(lambda: checked(bad, lambda *_given: lambda *_args: (torch.ones(1, 2),))(torch.tensor([7])))
    assert found(report) == {("exception.missing", "candidate")}
    assert report.findings[0].expected == "IndexError"


@pytest.mark.parametrize("on_divergence", ["raise", "record"])
def test_another_exception_is_a_finding_and_the_user_gets_eagers(on_divergence: str) -> None:
    compiled = checked(bad, lambda *_given: raising(RuntimeError("kernel: out of bounds")), on_divergence=on_divergence)

    with cb.collect() as session, pytest.raises(IndexError, match="out of range"):
        compiled(torch.tensor([7]))
    [finding] = session.report.findings
    assert (finding.detail, finding.subject) == ("exception.type", "candidate")
    assert (finding.expected or "").startswith("IndexError: ")
    assert finding.actual == "RuntimeError: kernel: out of bounds"


def test_the_same_exception_is_no_finding() -> None:
    with cb.collect() as session, pytest.raises(torch.linalg.LinAlgError):
        checked(torch.linalg.cholesky, faults.clean())(-torch.eye(3))
    assert (session.report.findings, session.report.coverage.notes) == ((), ())


def test_the_same_type_with_other_words_is_told() -> None:
    wrong = raising(torch.linalg.LinAlgError("something else went wrong"))
    compiled = checked(torch.linalg.cholesky, lambda *_given: wrong)

    with cb.collect() as session, pytest.raises(torch.linalg.LinAlgError, match="positive-definite"):
        compiled(-torch.eye(3))
    [note] = session.report.coverage.notes
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


def test_backward_that_writes_to_the_gradient_it_is_given() -> None:
    x = torch.randn(6, requires_grad=True)
    given = torch.ones(6)
    report = gathered(lambda: checked(torch.sin, faults.overwritten_cotangent())(x).backward(given))
    assert found(report) == {("mutation.unexpected", "gradient of output[0]")}
    torch.testing.assert_close(x.grad, x.detach().cos())  # and the checker's own runs have not changed it
