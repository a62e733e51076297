"""Operators registered wrongly: one for each thing that torch's own check of operators looks at."""

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
    report = cb.check(function, args, compiler=COMPILER)
    return " ".join(report.to_text(verbose=True).split())


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


def test_complex_outputs(library: torch.library.Library) -> None:
    def turned(z: torch.Tensor, rightly: bool) -> torch.Tensor:
        return z * 1 if rightly or not _traced(z) else z.conj().clone()

    library.define("turn(Tensor z, bool rightly) -> Tensor")
    library.impl("turn", turned, "CompositeImplicitAutograd")
    z = torch.randn(4, dtype=torch.complex64, requires_grad=True)
    agreed(cb.check(lambda z: op("turn")(z, True), (z,), compiler=COMPILER), gradients=1)
    subjects = {subject for _, subject in found(cb.check(lambda z: op("turn")(z, False), (z,), compiler=COMPILER))}
    assert "output[0]" in subjects


class _NotConjugated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: torch.Tensor, rightly: bool) -> torch.Tensor:
        ctx.rightly = rightly
        return z.detach() * (2 + 1j)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient * (2 - 1j if ctx.rightly or not _traced(gradient) else 2 + 1j), None


def test_complex_gradients(library: torch.library.Library) -> None:
    """The gradient of a real loss has the conjugate factor; a sum of real parts as the loss would not show it."""
    library.define("times_complex(Tensor z, bool rightly) -> Tensor")
    library.impl("times_complex", lambda z, rightly: _NotConjugated.apply(z, rightly), "CompositeImplicitAutograd")
    z = torch.randn(4, dtype=torch.complex64, requires_grad=True)
    agreed(cb.check(lambda z: op("times_complex")(z, True), (z,), compiler=COMPILER), gradients=1)
    wrong = cb.check(lambda z: op("times_complex")(z, False), (z,), compiler=COMPILER)
    assert found(wrong) == {("logic", "grad[z]")}


def test_random_numbers_are_drawn_from_the_same_state(library: torch.library.Library) -> None:
    library.define("noisy(Tensor x, bool twice) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))

    def noisy(x: torch.Tensor, twice: bool) -> torch.Tensor:
        extra = torch.rand(2).sum() * 0 if twice and _traced(x) else 0
        return x + torch.rand(x.shape) + extra

    library.impl("noisy", noisy, "CompositeImplicitAutograd")
    agreed(cb.check(lambda x: op("noisy")(x, False), (batch(3),), compiler=COMPILER))
    report = cb.check(lambda x: op("noisy")(x, True), (batch(3),), compiler=COMPILER)
    assert report.verdict is cb.Verdict.FAIL
    assert {detail for detail, _ in found(report)} <= {"rng.state", "rng.stream", "logic", "precision"}


def test_no_output_requires_grad_in_eager(library: torch.library.Library) -> None:
    """Eager refuses to differentiate; so must the compiled side."""
    library.define("cut(Tensor x, bool always) -> Tensor")

    def cut(x: torch.Tensor, always: bool) -> torch.Tensor:
        return x * 2 if _traced(x) and not always else x.detach() * 2

    library.impl("cut", cut, "CompositeImplicitAutograd")
    x = batch(3, grad=True)
    agreed(cb.check(lambda x: op("cut")(x, True), (x,), compiler=COMPILER), exceptions=1)
    report = cb.check(lambda x: op("cut")(x, False), (x,), compiler=COMPILER)
    assert "exception.missing" in {detail for detail, _ in found(report)}


def test_data_that_are_baked_into_the_trace(library: torch.library.Library) -> None:
    """The fake kernel's sizes come from the data of the first call."""
    known: list[float] = []

    def first_mean(x: torch.Tensor) -> torch.Tensor:
        if not _traced(x):
            known[:] = known or [float(x.mean())]
            return x - x.mean()
        return x - known[0]

    library.define("centre(Tensor x) -> Tensor")
    library.impl("centre", first_mean, "CompositeImplicitAutograd")
    function = lambda x: op("centre")(x)  # noqa: E731
    agreed(cb.check(function, (batch(8),), compiler=COMPILER))
    known.clear()
    report = cb.check(function, (batch(8),), compiler=COMPILER, vary_data=True)
    (finding,) = report.findings
    assert finding.subject == "output[0]"
    assert finding.evidence["failing_calls"].startswith("on fresh data (1)")


def test_preconditions_on_data_are_skipped_and_not_passed(library: torch.library.Library) -> None:
    def picky(x: torch.Tensor) -> torch.Tensor:
        if not _traced(x) and float(x[0]) != 1:
            raise ValueError("it must begin with one")
        return x * 2

    library.define("picky(Tensor x) -> Tensor")
    library.impl("picky", picky, "CompositeImplicitAutograd")
    report = cb.check(lambda x: op("picky")(x), (torch.ones(4),), compiler=COMPILER, vary_data=True)
    assert "eager refuses it: ValueError: it must begin with one" in skips(report)


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
