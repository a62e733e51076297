"""Programs of several regions, shapes and copies: clean passes, a fault planted just there is found."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import checked_backend as cb
from tests.support import faults
from tests.support.region_tools import agreed, audit, backwards, calls, checked, clean_reports, found, gathered

Compile = Callable[..., Any]
BOTH = ("python", "aot")

# Dynamo itself looks at .grad of every input
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


# graph breaks


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


@pytest.mark.parametrize("how", BOTH)
@pytest.mark.parametrize("region", [0, 1])
def test_fault_in_one_region_of_two(region: int, how: Any) -> None:
    """The finding names the region and the user's line in it."""
    wrong = faults.scaled_gradient(("first", "second")[region] + ".weight", how)

    def in_one(gm: Any, inputs: Any) -> Any:
        return (wrong if _has(gm, ("first", "second")[region]) else faults.clean(how))(gm, inputs)

    report = audit(two_regions, in_one)
    assert found(report) == {("logic", f"grad[{('first', 'second')[region]}.weight]")}
    [finding] = report.findings
    line = ("hidden = self.first(x).tanh()", "return self.second(hidden)")[region]
    assert line in (finding.source or "")


def _has(gm: Any, name: str) -> bool:
    return any(node.op == "placeholder" and name in node.name for node in gm.graph.nodes)


# dynamic shapes


def growing(compile_: Compile, **more: Any) -> None:
    model = compile_(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)), **more)
    for rows in (3, 5, 7, 9):
        model(torch.randn(rows, 4)).square().sum().backward()


def marked(compile_: Compile) -> None:
    model = compile_(nn.Linear(4, 2))
    for rows in (3, 8):
        x = torch.randn(rows, 4)
        torch._dynamo.mark_dynamic(x, 0)
        model(x).square().sum().backward()


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("program", "regions", "passes"),
    [
        (marked, 1, 2),
        (growing, 2, 4),  # the first for 3 rows, then one for any number
        (lambda compile_: growing(compile_, dynamic=True), 1, 4),
        (lambda compile_: growing(compile_, dynamic=False), 4, 4),
    ],
)
def test_dynamic_shapes(program: Any, regions: int, passes: int) -> None:
    for report in clean_reports(program):
        assert len(report.coverage.regions) == regions
        assert calls(report) == backwards(report) == passes
    assert ("logic", "output[0]") in found(audit(program, faults.one_element(0, "python")))
    name = "weight" if program is marked else "2.weight"
    report = audit(program, faults.scaled_gradient(name, "aot"))
    assert found(report) == {("logic", f"grad[{name}]")}
    assert len({finding.region for finding in report.findings}) == regions


def test_wrong_only_at_the_second_shape() -> None:
    """A scale of noise learned at one size does not hide an error at another."""

    def late(tensor: torch.Tensor) -> torch.Tensor:
        return tensor * 1.001 if tensor.shape[0] == 9 else tensor

    def program(compile_: Compile) -> None:
        growing(compile_, dynamic=True)

    report = audit(program, faults.spoiled_output(late, 0, "aot"))
    assert {subject for _, subject in found(report)} == {"output[0]"}


# tensor subclasses


def test_wrapper_subclass() -> None:
    def program(compile_: Compile) -> None:
        x = TwoTensor(torch.randn(3, 4), torch.randn(3, 4))
        compile_(lambda x: x.sin() * 2)(x)

    for report in clean_reports(program):
        assert report.coverage.checked["outputs"] == 1
        assert report.coverage.checked["tensors"] == 2  # both halves are compared

    def one_half(tensor: Any) -> Any:
        return TwoTensor(tensor.a, tensor.b * 1.01)

    report = audit(program, faults.spoiled_output(one_half))
    assert {subject for _detail, subject in found(report)} == {"output[0]"}
    assert report.findings[0].metrics is not None
    plain = faults.spoiled_output(lambda tensor: tensor.a)
    assert found(audit(program, plain)) == {("structure.type", "output[0]")}


def test_gradient_of_a_wrapper_subclass() -> None:
    def program(compile_: Compile) -> None:
        x = TwoTensor(torch.randn(3, 4), torch.randn(3, 4)).requires_grad_()
        compile_(lambda x: x.sin() * 2)(x).sum().backward()

    for report in clean_reports(program):
        assert report.coverage.checked["gradients"] == 1
    for how in BOTH:
        assert {subject for _detail, subject in found(audit(program, faults.scaled_gradient("x", how)))} == {"grad[x]"}


# copies


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
    report = gathered(lambda: duplicate(x).sum().backward())
    assert agreed(report)
    assert calls(report) == backwards(report) == 1
    assert [p.grad for p in compiled.parameters()] == [None] * 4

    torch._dynamo.reset()
    wrong = copy.deepcopy(checked(Small(), faults.scaled_gradient("linear.weight", "aot")))
    assert ("logic", "grad[linear.weight]") in found(gathered(lambda: wrong(x).square().sum().backward()))


def test_pickled_model() -> None:
    """A model is saved after it was compiled and run, loaded, and compiled again."""
    model = Small()
    x = torch.randn(3, 4)
    checked(model, "aot_eager")(x).sum().backward()
    loaded = pickle.loads(pickle.dumps(model))  # noqa: S301  our own bytes
    for compiler, wrong in (
        ("aot_eager", set()),
        (faults.zeroed_gradient("linear.weight"), {("logic", "grad[linear.weight]")}),
    ):
        torch._dynamo.reset()
        compiled = checked(loaded, compiler)
        assert found(gathered(lambda compiled=compiled: compiled(x).square().sum().backward())) == wrong


def test_saved_state_of_a_compiled_model() -> None:
    compiled = checked(Small(), "aot_eager")
    x = torch.randn(3, 4)
    compiled(x)
    file = io.BytesIO()
    torch.save(compiled.state_dict(), file)
    file.seek(0)
    other = checked(Small(), "aot_eager")
    other.load_state_dict(torch.load(file, weights_only=True))
    with torch.no_grad():
        compiled.eval(), other.eval()
        assert torch.equal(other(x), compiled(x))


def test_compiled_in_place() -> None:
    """`model.compile()` instead of `torch.compile(model)`."""
    model = Small()
    options = {"compiler": faults.scaled_gradient("linear.weight"), "on_divergence": "record", "localize": False}
    model.compile(backend="numcheck", options=options)
    report = gathered(lambda: model(torch.randn(3, 4)).square().sum().backward())
    assert found(report) == {("logic", "grad[linear.weight]")}


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

    report = audit(program, "aot_eager")
    assert agreed(report)
    assert report.coverage.checked["outputs"] == 2
    assert returned[0].tolist() == [-2.0, 4.0, -8.0, 16.0]
    assert ("logic", "output[0]") in found(audit(program, faults.wrong_value(0)))
    assert found(audit(program, "eager", on_divergence="fallback")) == {("logic", "output[0]"), ("logic", "output[1]")}
    assert returned[0].tolist() == [-2.0, 4.0, -8.0, 16.0]  # eager's, not what FX's code computes
