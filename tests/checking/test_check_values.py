"""Arguments, results and modules of unusual kinds: each is compared, or it is said that it is not."""

from __future__ import annotations

import itertools
import warnings
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import checked_backend as cb
from checked_backend.checking.backward import Objective, run_backward
from checked_backend.checking.copies import Copier
from checked_backend.checking.tree import MOST_YIELDED, settled
from tests.support import faults
from tests.support.check_tools import agreed, batch, found, only, program_of, rounding_otherwise, wrong_sine

pytestmark = pytest.mark.filterwarnings(
    "ignore:Lazy modules", "ignore:The PyTorch API of nested tensors", "ignore:torch.ao", "ignore:.*is deprecated"
)


ITERATORS: dict[str, Callable[[torch.Tensor], Any]] = {
    "iter": lambda x: iter([x * 2, x.sin()]),
    "map": lambda x: map(torch.neg, [x, x.sin()]),
    "deque": lambda x: deque([x * 2, x.sin()], maxlen=2),
    "deque inside": lambda x: {"queue": deque([x.sin()])},
    "iter inside": lambda x: (x.sin(), iter([3])),
}


@pytest.mark.parametrize("name", ITERATORS)
def test_what_iterators_and_deques_hold_is_compared(name: str) -> None:
    agreed(cb.check(ITERATORS[name], (batch(),), compiler="eager"))
    assert {detail for detail, _ in found(cb.check(ITERATORS[name], (batch(),), compiler=wrong_sine))} == {"logic"}


def test_an_endless_iterator_is_read_in_part() -> None:
    assert settled(itertools.count()) == list(range(MOST_YIELDED))


def test_a_coroutine_is_refused() -> None:
    async def program(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    with pytest.raises(cb.CheckedBackendError, match=r"asynchronous.*asyncio\.run"):
        cb.check(program, (batch(),), compiler="eager")


class Odd:
    """Its equality raises."""

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        raise RuntimeError("no equality")

    __hash__ = None  # type: ignore[assignment]


def test_an_equality_that_raises_decides_nothing() -> None:
    agreed(cb.check(lambda x: (x * 2, Odd()), (batch(),), compiler="eager"))


def test_a_lazy_module_makes_its_parameters_on_both_sides() -> None:
    """Dynamo rolls back the random state that the initialisation drew from, which eager does not: a real difference."""
    model = nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.LazyBatchNorm1d())
    report = cb.check(model, (batch(3, 5),), compiler="eager")
    assert found(report) == {("rng.state", "rng state")}
    assert report.coverage.checked["gradients"] == 4
    assert isinstance(model[0].weight, nn.parameter.UninitializedParameter)
    wrong = cb.check(model, (batch(3, 5),), compiler=_shifted)
    assert ("structure.outputs", "param[0.weight]") not in found(wrong)
    assert "logic" in {detail for detail, _ in found(wrong)}


def test_the_gradient_of_an_argument_that_the_program_makes_require_it_is_compared() -> None:
    agreed(cb.check(lambda x: x.requires_grad_() * 2, (batch(3),), compiler="eager"), gradients=1)


_shifted = faults.every_output(lambda output: output + 1)


def test_nested_tensors_in_the_strided_layout_have_parts() -> None:
    def program(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.sin(), torch.nested.nested_tensor([x.detach().sin(), y.detach()])

    check = partial(cb.check, program, (batch(2, 3), batch(4, 3)))
    agreed(check(compiler="eager"))
    assert "output[0]" in {subject for _, subject in found(check(compiler=wrong_sine))}
    x = torch.nested.nested_tensor([batch(2, 3), batch(4, 3)])
    in_eager = cb.check(lambda x: x * 2, (x,), compiler="eager")
    assert not found(in_eager)
    assert in_eager.coverage.checked["tensors"] >= 4


def test_quantised_results_are_compared_by_what_they_stand_for() -> None:
    check = partial(cb.check, lambda x: torch.quantize_per_tensor(x.sin(), 0.05, 0, torch.qint8), (batch(),))
    agreed(check(compiler="eager"), outputs=1)
    assert only(check(compiler=wrong_sine)).subject == "output[0]"


def test_meta_tensors_have_a_structure_and_no_values() -> None:
    x = torch.empty(3, 4, device="meta")
    agreed(cb.check(lambda x: x.sin(), (x,), compiler="eager"))
    report = cb.check(lambda x: x.sin(), (x,), compiler=lambda gm, _: lambda *args: (gm.forward(*args)[0].t(),))
    assert ("structure.shape", "output[0]") in found(report)


class Tagged(torch.Tensor):
    """A subclass without a ``new_empty`` of its own."""


def test_a_plain_subclass_is_copied_with_its_type() -> None:
    x: Any = batch(grad=True).as_subclass(Tagged)
    x.label = ["mine"]
    (copied,), _ = Copier().arguments(lambda x: x, (x,), {})
    assert type(copied) is Tagged
    assert torch.equal(copied.as_subclass(torch.Tensor), x.as_subclass(torch.Tensor))
    assert copied.data_ptr() != x.data_ptr()
    assert copied.label == ["mine"]
    assert copied.requires_grad
    agreed(cb.check(lambda x: x * 2, (batch().as_subclass(Tagged),), compiler="eager"))


def test_attributes_of_a_parameter_are_copied() -> None:
    model: Any = nn.Linear(3, 3)
    model.weight.scale = 3.0
    model.weight.offset = torch.ones(3)

    check = partial(cb.check, lambda x: (model(x) * model.weight.scale + model.weight.offset).sin(), (batch(2, 3),))
    agreed(check(compiler="eager"))
    assert only(check(compiler=wrong_sine, gradients=False)).subject == "output[0]"


def test_hooks_of_parameters_and_arguments_run_in_the_copies_and_leave_the_users_state() -> None:
    model, seen = nn.Linear(3, 3), []
    model.weight.register_hook(lambda gradient: gradient * 3)
    model.bias.register_post_accumulate_grad_hook(lambda bias: seen.append(bias.grad))
    x = batch(2, 3, grad=True)
    x.register_hook(lambda gradient: gradient / 2)
    outcome = program_of(model, x).run()
    model(x).backward(_random_gradient_of(model(x)))
    for name, tensor in (("weight", model.weight), ("bias", model.bias), ("input", x)):
        assert torch.equal(outcome.gradients[f"grad[{name}]"], tensor.grad), name
    assert len(seen) == 1
    agreed(cb.check(model, (x,), compiler="aot_eager"), gradients=3)
    assert len(seen) == 1


def _random_gradient_of(output: torch.Tensor) -> torch.Tensor:
    leaf = output.detach().requires_grad_()
    run_backward({"output[0]": leaf * 1}, [leaf], Objective())
    assert leaf.grad is not None
    return leaf.grad


def test_numpys_scalars_are_arrays_when_compiled() -> None:
    check = partial(cb.check, lambda x: {"sum": x.sum(), "int": x.argmax()}, (batch().numpy(),))
    told = "output[sum]: eager's NumPy scalar is an array of no dimensions when compiled"
    assert told in str(agreed(check(compiler="eager")).coverage.notes)
    assert {detail for detail, _ in found(check(compiler=_shifted))} == {"logic"}


def standard_deviations(x: Any, y: torch.Tensor) -> Any:
    scaled = np.exp(x - x.max(axis=1, keepdims=True))
    deviations = torch.from_numpy(x.std(axis=0)) * y
    return scaled / scaled.sum(axis=1, keepdims=True), deviations, (x * x).mean() - x.mean() ** 2


def test_numpy_rounds_otherwise_than_torch_in_its_place() -> None:
    """Dynamo computes in torch what NumPy computes in eager, so their roundings differ; no mode sees NumPy's."""
    x = np.random.default_rng(0).normal(size=(20, 30)).astype(np.float32) + 10
    agreed(cb.check(standard_deviations, (x, torch.randn(30)), compiler="eager"))
    slightly_wrong = faults.every_output(lambda output: output * 1.00001)
    report = cb.check(standard_deviations, (x, torch.randn(30)), compiler=slightly_wrong)
    assert {detail for detail, _ in found(report)} == {"logic"}
    assert len(report.findings) == 3


def test_warnings_are_no_errors_of_the_program() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_compiling():
            warnings.warn("only in eager", UserWarning, stacklevel=1)
        return x.sin()

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("error")
        before = list(warnings.filters)
        report = cb.check(program, (batch(),), compiler="eager")
        assert list(warnings.filters) == before
    agreed(report)
    assert [str(entry.message) for entry in seen] == ["only in eager"]


def test_a_random_state_that_eager_leaves_anew_each_time_is_no_finding():
    report = cb.check(lambda x: (torch.seed(), x.sin())[1], (torch.randn(5),), compiler="eager")
    assert not found(report)
    assert any("torch.seed" in skip.reason for skip in report.coverage.skipped)


def test_what_region_and_program_check_has_the_better_detection_limit() -> None:
    """The whole program's own comparison has no float64 twin; its region's has, and would have caught more."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)).to(torch.bfloat16)
    report = agreed(cb.check(model, (batch().bfloat16(),), compiler=rounding_otherwise))
    powers = report.coverage.detection_limit
    assert len([name for name in powers if name.startswith("grad[")]) == 4
    assert max(powers.values()) < 1e-6
    # which says nothing of Dynamo's own trace, nor of kernels that are wrong in bfloat16 alone
    own = report.coverage.own_precision_limit
    assert {"output[0]", "grad[0.weight]"} <= own.keys() <= powers.keys()
    assert min(own.values()) > 1e-3


def test_power_against_a_wrong_trace_is_told() -> None:
    """The region's float64 twin is made of what Dynamo traced."""

    def traced_as(factor: float) -> cb.Report:
        def scaled(x: torch.Tensor) -> torch.Tensor:
            return (x * x.exp()).tanh() * (factor if torch.compiler.is_compiling() else 1.0)

        return cb.check(scaled, (torch.linspace(-2, 2, 99).bfloat16(),), compiler=rounding_otherwise)

    told = agreed(traced_as(1.0)).coverage.own_precision_limit["output[0]"]
    assert 1e-3 < told < 0.5
    assert found(traced_as(1 + 6 * told))


def test_the_power_of_several_calls_is_the_weakest_ones() -> None:
    class Settling(nn.Module):
        """What it adds and takes away again, and so its noise, gets smaller with each call."""

        offset: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("offset", torch.tensor(1e4))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            moved = (x * 1.1 + self.offset) - self.offset
            self.offset.mul_(1e-2)
            return moved, x.sin()

    last_bits = faults.every_output(lambda y: y * (1 + 2**-23) if y.dtype is torch.float32 else y)
    once, more = (agreed(cb.check(Settling(), (batch(),), compiler=last_bits, iterations=count)) for count in (1, 3))
    power = once.coverage.own_precision_limit["output[0]"]
    assert power > 1e-4
    assert more.coverage.own_precision_limit["output[0]"] >= power / 2
