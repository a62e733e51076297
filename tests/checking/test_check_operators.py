"""Operators registered wrongly: one for each thing that torch's own check of operators looks at."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from check_tools import agreed, batch, found, skips

import checked_backend as cb

COMPILER = "aot_eager"


@pytest.fixture
def library() -> Iterator[torch.library.Library]:
    with torch.library._scoped_library("cb_wrong", "FRAGMENT") as made:
        yield made


def op(name: str) -> Any:
    return getattr(torch.ops.cb_wrong, name)


def test_arguments_that_are_no_tensors(library: torch.library.Library) -> None:
    """The trace holds them as constants, and one that the fake kernel reads wrongly shows."""
    library.define("scale(Tensor x, int times, str how) -> Tensor")
    library.impl("scale", lambda x, times, how: x * times if how == "times" else x + times, "CPU")
    library.impl("scale", lambda x, times, how: x.new_empty(times), "Meta")
    agreed(cb.check(lambda x, n, how: op("scale")(x, n, how), (batch(3), 3, "times"), compiler=COMPILER))
    report = cb.check(lambda x, n, how: op("scale")(x, n, how).sum(0), (batch(4), 3, "times"), compiler=COMPILER)
    assert report.verdict is cb.Verdict.PASS or report.findings  # a real shape wins over a traced one in eager code
    traced = cb.check(lambda x, n: x.new_zeros(op("scale")(x, n, "times").shape), (batch(4), 3), compiler=COMPILER)
    assert ("structure.shape", "output[0]") in found(traced)


def test_dynamic_sizes(library: torch.library.Library) -> None:
    """The fake kernel knows one size only."""
    library.define("double(Tensor x) -> Tensor")
    library.impl("double", lambda x: x * 2, "CPU")
    library.impl("double", lambda x: x.new_empty((5,)) if x.shape[0] > 4 else torch.empty_like(x), "Meta")

    def function(x: torch.Tensor) -> torch.Tensor:
        return x.new_ones(op("double")(x).shape)

    agreed(cb.check(function, (batch(5),), compiler=COMPILER))
    report = cb.check(function, (batch(5),), compiler=COMPILER, dynamic=True)
    shown = [finding.evidence.get("calls that show it", "") for finding in report.findings]
    assert shown
    assert all("with x 7" in text or "with x 6" in text for text in shown)


class _WrongUnderTrace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.detach() ** 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        factor = 3 if type(x) is not torch.Tensor or torch.compiler.is_compiling() else 2
        return gradient * x * factor


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
    def turned(z: torch.Tensor) -> torch.Tensor:
        return z.conj().clone() if type(z) is not torch.Tensor or torch.compiler.is_compiling() else z * 1

    library.define("turn(Tensor z) -> Tensor")
    library.impl("turn", turned, "CompositeImplicitAutograd")
    z = torch.randn(4, dtype=torch.complex64, requires_grad=True)
    subjects = {subject for _, subject in found(cb.check(lambda z: op("turn")(z), (z,), compiler=COMPILER))}
    assert "output[0]" in subjects


def test_random_numbers_are_drawn_from_the_same_state(library: torch.library.Library) -> None:
    library.define("noisy(Tensor x, bool twice) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))

    def noisy(x: torch.Tensor, twice: bool) -> torch.Tensor:
        extra = torch.rand(2).sum() * 0 if twice and type(x) is not torch.Tensor else 0
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
        tracing = type(x) is not torch.Tensor or torch.compiler.is_compiling()
        return x * 2 if tracing and not always else x.detach() * 2

    library.impl("cut", cut, "CompositeImplicitAutograd")
    x = batch(3, grad=True)
    agreed(cb.check(lambda x: op("cut")(x, True), (x,), compiler=COMPILER), exceptions=1)
    report = cb.check(lambda x: op("cut")(x, False), (x,), compiler=COMPILER)
    assert "exception.missing" in {detail for detail, _ in found(report)}


def test_data_that_are_baked_into_the_trace(library: torch.library.Library) -> None:
    """The fake kernel's sizes come from the data of the first call."""
    known: list[float] = []

    def first_mean(x: torch.Tensor) -> torch.Tensor:
        if type(x) is torch.Tensor and not torch.compiler.is_compiling():
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
    assert finding.evidence["calls that show it"].startswith("on fresh data (1)")


def test_preconditions_on_data_are_skipped_and_not_passed(library: torch.library.Library) -> None:
    def picky(x: torch.Tensor) -> torch.Tensor:
        if type(x) is torch.Tensor and not torch.compiler.is_compiling() and float(x[0]) != 1:
            raise ValueError("it must begin with one")
        return x * 2

    library.define("picky(Tensor x) -> Tensor")
    library.impl("picky", picky, "CompositeImplicitAutograd")
    report = cb.check(lambda x: op("picky")(x), (torch.ones(4),), compiler=COMPILER, vary_data=True)
    assert "eager refuses it: ValueError: it must begin with one" in skips(report)


def test_findings_say_outputs_or_gradients() -> None:
    def outputs(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if not torch.compiler.is_compiling() else x * 2.01

    report = cb.check(outputs, (batch(3, grad=True),), compiler=COMPILER)
    text = str(report)
    assert "output[0]" in text
    assert "What to do next" in text
