"""Misuse, compilers that break their contract, and eager's own exceptions: each is a typed error at the first call."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import checked_backend as cb
from tests.support import faults


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).tanh()


def numcheck(function: Callable[..., Any], compiler: Any, **options: Any) -> Any:
    return torch.compile(function, backend="numcheck", options={"compiler": compiler, "localize": False, **options})


def data() -> torch.Tensor:
    return torch.randn(6, 5)


# options


@pytest.mark.parametrize("suppress", [False, True])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compiler": "inductr"}, r"option 'compiler' got 'inductr'.*Valid: .*aot_eager.*inductor"),
        (
            {"compiler": "inductor", "compiler_options": {"force_disable_caches": True, "cpp.simdlens": 1}},
            r"'compiler_options' got 'cpp.simdlens', which Inductor does not have. Near it: cpp.simdlen",
        ),
        ({"bogus": 1}, r"has no option 'bogus'. Valid options: .*compiler.*reference"),
        (
            {"on_divergence": "explode"},
            r"option 'on_divergence' got 'explode'.*'raise', 'warn', 'record' or 'fallback'",
        ),
        ({"every": 0}, r"option 'every' got 0.*greater than or equal to 1"),
        ({"compiler": "numcheck"}, r"cannot check itself"),
    ],
)
def test_bad_options_are_an_error_at_the_first_call(options: dict[str, Any], message: str, suppress: bool) -> None:
    with torch._dynamo.config.patch(suppress_errors=suppress):
        compiled = torch.compile(Net(), backend="numcheck", options=options)
        for _ in range(2):
            with pytest.raises(cb.OptionError, match=message):
                compiled(data())


# compilers


@pytest.mark.parametrize("suppress", [False, True])
@pytest.mark.parametrize(
    ("compiler", "kind", "text"),
    [
        (faults.crash_when_compiling(), cb.Kind.CRASH, "PlantedError: the compiler crashed"),
        (faults.crash_when_compiling("aot"), cb.Kind.CRASH, "PlantedError: the compiler crashed"),
        (faults.crash_when_running(), cb.Kind.CRASH, "PlantedError: the compiled region crashed"),
        (faults.not_a_function(), cb.Kind.CRASH, "is a `return` missing?"),
        (faults.returns_none(), cb.Kind.STRUCTURE, "wrong number of outputs"),
        (faults.missing_output(), cb.Kind.STRUCTURE, "wrong number of outputs"),
        (faults.extra_output(), cb.Kind.STRUCTURE, "wrong number of outputs"),
    ],
)
def test_broken_compilers_are_typed_errors(compiler: Any, kind: cb.Kind, text: str, suppress: bool) -> None:
    with torch._dynamo.config.patch(suppress_errors=suppress):
        compiled = numcheck(Net(), compiler)
        for _ in range(2):
            with pytest.raises(cb.DivergenceError) as caught:
                compiled(data())
            assert {finding.kind for finding in caught.value.report.findings} == {kind}
            assert text in " ".join(str(caught.value).split())


def test_the_compilers_own_exception_is_the_cause() -> None:
    with pytest.raises(cb.DivergenceError) as caught:
        numcheck(Net(), faults.crash_when_running())(data())
    assert isinstance(caught.value.__cause__, faults.PlantedError)


@pytest.mark.parametrize("on_divergence", ["record", "warn", "fallback"])
@pytest.mark.parametrize("make", [faults.crash_when_running, faults.crash_when_compiling, faults.returns_none])
def test_the_program_goes_on_in_eager_after_a_crash(make: Callable[[], Any], on_divergence: str) -> None:
    model = Net().eval()
    x = data()
    compiled = numcheck(model, make(), on_divergence=on_divergence)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", cb.errors.DivergenceWarning)
        for _ in range(2):
            assert torch.equal(compiled(x), model(x))


@pytest.mark.parametrize("on_divergence", ["record", "fallback"])
@pytest.mark.parametrize("when", ["compiling", "running"])
def test_gradients_are_eagers_after_a_crash_in_backward(when: Any, on_divergence: str) -> None:
    model, x = Net().eval(), data()
    compiled = numcheck(model, faults.crash_in_backward(when), on_divergence=on_divergence)
    wanted = [*model.parameters()]
    with cb.collect() as session:
        actual = torch.autograd.grad(compiled(x).square().sum(), wanted)
    expected = torch.autograd.grad(model(x).square().sum(), wanted)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    assert [finding.detail for finding in session.report.findings] == ["crash.backward"]
    assert "gradients" not in session.report.coverage.checked  # there was nothing to compare


# eager itself raises


def out_of_range(x: torch.Tensor) -> torch.Tensor:
    return torch.embedding(torch.ones(3, 2), x)


def not_positive_definite(x: torch.Tensor) -> torch.Tensor:
    return torch.linalg.cholesky(x)


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
@pytest.mark.parametrize("on_divergence", ["raise", "record", "fallback"])
@pytest.mark.parametrize(("function", "x"), [(out_of_range, torch.tensor([7])), (not_positive_definite, -torch.eye(2))])
def test_eagers_own_exception_is_raised(
    function: Callable[..., Any], x: torch.Tensor, on_divergence: str, compiler: str
) -> None:
    if (function, compiler) == (not_positive_definite, "aot_eager") and torch.__version__.startswith("2.11."):
        pytest.skip("torch 2.11 loses the exception, which is a finding")
    with pytest.raises(Exception) as expected:  # noqa: PT011  compared below
        function(x)
    compiled = numcheck(function, compiler, on_divergence=on_divergence)
    with pytest.raises(type(expected.value)) as actual:
        compiled(x)
    assert type(actual.value) is type(expected.value)
    assert str(actual.value) == str(expected.value)
