"""Operators registered wrongly: what torch's own check of operators looks at and no program of the user's shows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import checked_backend as cb
from tests.support.check_tools import agreed, batch, found, skips

COMPILER = "aot_eager"


@pytest.fixture
def library() -> Iterator[torch.library.Library]:
    with torch.library._scoped_library("cb_wrong", "FRAGMENT") as made:
        yield made


def told_of(function: Any, *args: Any) -> str:
    return " ".join(cb.check(function, args, compiler=COMPILER).to_text(verbose=True).split())


def op(name: str) -> Any:
    return getattr(torch.ops.cb_wrong, name)


def test_arguments_that_are_no_tensors(library: torch.library.Library) -> None:
    """The trace holds them as constants: an operator that reads one wrongly there, or its fake kernel does, shows."""

    def scaled(x: torch.Tensor, times: int, how: str, shifts: list[float]) -> torch.Tensor:
        scale = times + 1 if how == "wrongly" and _traced(x) else times
        return x * scale + sum(shifts)

    library.define("scale(Tensor x, int times, str how, float[] shifts) -> Tensor")
    library.impl("scale", scaled, "CompositeImplicitAutograd")
    function = lambda x, n, *, how, shifts: op("scale")(x, n, how, shifts)  # noqa: E731
    rest = {"shifts": [0.5, 1.0]}
    agreed(cb.check(function, (batch(3), 3), {"how": "rightly", **rest}, compiler=COMPILER))
    wrong = cb.check(function, (batch(3), 3), {"how": "wrongly", **rest}, compiler=COMPILER)
    assert found(wrong) == {("logic", "output[0]")}


def test_a_fake_kernel_that_reads_an_argument_wrongly(library: torch.library.Library) -> None:
    library.define("times(Tensor x, int times) -> Tensor")
    library.impl("times", lambda x, times: x * times, "CPU")
    library.impl("times", lambda x, times: x.new_empty(times), "Meta")
    function = lambda x, n: x.new_zeros(op("times")(x, n).shape)  # noqa: E731
    agreed(cb.check(function, (batch(3), 3), compiler=COMPILER))
    assert ("structure.shape", "output[0]") in found(cb.check(function, (batch(4), 3), compiler=COMPILER))


def test_dynamic_sizes(library: torch.library.Library) -> None:
    """The fake kernel knows one size only."""
    library.define("double(Tensor x) -> Tensor")
    library.impl("double", lambda x: x * 2, "CPU")
    library.impl("double", lambda x: x.new_empty((5,)) if x.shape[0] > 4 else torch.empty_like(x), "Meta")

    def function(x: torch.Tensor) -> torch.Tensor:
        return x.new_ones(op("double")(x).shape)

    agreed(cb.check(function, (batch(5),), compiler=COMPILER))
    report = cb.check(function, (batch(5),), compiler=COMPILER, dynamic=True)
    shown = [finding.evidence.get("failing_calls", "") for finding in report.findings]
    assert shown
    assert all("with x 7" in text or "with x 6" in text for text in shown)


def _traced(tensor: torch.Tensor) -> bool:
    return type(tensor) is not torch.Tensor or torch.compiler.is_compiling()


class _WrongUnderTrace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.detach() ** 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return gradient * x * (3 if _traced(x) else 2)


def test_a_gradient_that_is_not_traceable(library: torch.library.Library) -> None:
    library.define("square(Tensor x) -> Tensor")
    library.impl("square", lambda x: _WrongUnderTrace.apply(x), "CompositeImplicitAutograd")
    x = batch(3, grad=True)
    agreed(cb.check(op("square"), (x.detach(),), compiler=COMPILER))
    assert found(cb.check(lambda x: op("square")(x), (x,), compiler=COMPILER)) == {("logic", "grad[x]")}
    with torch.no_grad():
        agreed(cb.check(lambda x: op("square")(x), (x,), compiler=COMPILER))


def test_gradients_auto_checks_them_if_something_requires_grad(library: torch.library.Library) -> None:
    library.define("plain(Tensor x) -> Tensor")
    library.impl("plain", lambda x: x.exp(), "CompositeImplicitAutograd")
    report = agreed(cb.check(lambda x: op("plain")(x), (batch(3),), compiler=COMPILER))
    assert "nothing was differentiated" in skips(report)
    agreed(cb.check(lambda x: op("plain")(x), (batch(3, grad=True),), compiler=COMPILER), gradients=1)


def test_findings_say_outputs_or_gradients_which_one_and_what_it_may_mean(library: torch.library.Library) -> None:
    library.define("cube(Tensor x) -> Tensor")
    library.impl("cube", lambda x: _WrongUnderTrace.apply(x), "CompositeImplicitAutograd")
    library.define("double_all(Tensor x) -> Tensor")
    library.impl("double_all", lambda x: x * (2.01 if _traced(x) else 2), "CompositeImplicitAutograd")
    x, y = batch(3, grad=True), batch(3, grad=True)
    outputs = told_of(lambda x, y: {"sum": x + y, "double": op("double_all")(y)}, x, y)
    assert "logic, output[double]" in outputs
    assert "output[sum]" not in outputs
    gradients = told_of(lambda x, y: x * op("cube")(y), x, y)
    assert "logic, grad[y]" in gradients
    assert "grad[x]" not in gradients
    for text in (outputs, gradients):
        assert "AOT autograd: its graphs, run in eager, are wrong already" in text
        assert "What to do next" in text
