"""Where float64 has NaN or infinity and eager a number, float64 confirms nothing."""

from __future__ import annotations

import pytest
import torch

import checked_backend as cb
from tests.support import faults
from tests.support.region_tools import checked, gathered


def residue(x):
    return x / 3.1 * 3.1 - x


def candidates():
    return torch.arange(1, 4000, dtype=torch.float32) / 7


def singular():
    """Numbers whose residue is zero in float64 alone; division and product are those of IEEE 754 everywhere."""
    x = candidates()
    return x[(residue(x) != 0) & (residue(x.double()) == 0)][:32]


def regular():
    """Numbers whose residue is zero at neither precision."""
    x = candidates()
    return x[(residue(x) != 0) & (residue(x.double()) != 0)][:32]


def without(x):
    return torch.exp((x + 1e-9 - x) * 1e12)  # in float32 1, in float64 beyond its range


PROGRAMS = {
    "quotient": lambda x: 1 / residue(x),
    "logarithm": lambda x: residue(x).abs().log(),
    "nan": lambda x: residue(x) / residue(x).abs(),
    "sum": lambda x: (1 / residue(x)).square().sum(),
    "overflow": without,
    "beyond float32": lambda x: torch.exp((x + 1e-9 - x) * 1e11),
    "condition": lambda x: torch.linalg.cond(torch.arctan(x[:4] * 0 + 1).reshape(2, 2)),
    "gradient": lambda x: torch.autograd.grad(residue(x).abs().log().sum(), x)[0],
}


def times(factor):
    return faults.spoiled_output(lambda tensor: tensor * factor)


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_is_infinite_in_float64_confirms_no_candidate(name):
    x = torch.full((32,), 1.0) if name in ("overflow", "beyond float32", "condition") else singular()
    if name == "condition" and PROGRAMS[name](x.double()).isfinite():
        pytest.skip("this processor's singular values of the matrix are no zeros")
    x.requires_grad_(name == "gradient")
    report = cb.check(PROGRAMS[name], (x,), compiler=times(3.0), gradients=False if name != "gradient" else "auto")
    assert report.verdict is not cb.Verdict.PASS, str(report)
    assert all(limit > 1e-6 for limit in report.coverage.detection_limit.values())


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, torch.float32) for name in PROGRAMS), ("quotient", torch.bfloat16)]
)
def test_singular_programs_that_are_compiled_rightly_are_not_reported(name, dtype):
    x = torch.full((32,), 1.0) if name in ("overflow", "beyond float32", "condition") else singular()

    def program(x):
        return PROGRAMS[name](x.float()) if name == "condition" else PROGRAMS[name](x)

    x = x.to(dtype).requires_grad_(name == "gradient")
    report = cb.check(program, (x,), compiler=faults.clean(), gradients=False if name != "gradient" else "auto")
    assert report.verdict is cb.Verdict.PASS, str(report)


@pytest.mark.parametrize("where", ["regular", "singular"])
def test_elements_that_float64_knows_are_compared_with_it_and_others_are_not(where):
    x = torch.cat([regular(), singular()])
    known = slice(0, 32) if where == "regular" else slice(32, None)

    def spoil(tensor):
        spoiled = tensor.clone()
        spoiled[known] = spoiled[known] * 1.01
        return spoiled

    report = cb.check(lambda x: torch.where(residue(x) == 0, torch.inf, x), (x,), compiler=faults.spoiled_output(spoil))
    if where == "regular":
        assert report.verdict is cb.Verdict.FAIL
        return
    assert report.verdict is cb.Verdict.INCONCLUSIVE
    reason = next(skip.reason for skip in report.coverage.skipped if skip.matters)
    assert "nothing tells who is wrong" in reason
    assert "32 of its elements" in reason


def test_gradients_that_float64_does_not_have_are_not_confirmed():
    class Log(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(32))
            self.register_buffer("x", singular())

        def forward(self):
            return self.weight * 0.5 + self.weight / residue(self.x)

    for compiler, verdict in ((faults.scaled_gradient("weight", 3.0), cb.Verdict.INCONCLUSIVE), (faults.clean(), None)):
        torch._dynamo.reset()
        compiled = checked(Log(), compiler)
        report = gathered(lambda compiled=compiled: compiled().sum().backward())
        assert report.verdict is (verdict or cb.Verdict.PASS), str(report)


def test_a_number_where_eager_and_float64_have_none_is_found():
    x = torch.zeros(8)
    report = cb.check(lambda x: 1 / x, (x,), compiler=faults.spoiled_output(lambda t: t.clamp_max(1e30)))
    assert {finding.detail for finding in report.findings} == {"nonfinite"}
    report = cb.check(lambda x: x / x, (x,), compiler=faults.spoiled_output(torch.zeros_like))
    assert {finding.detail for finding in report.findings} == {"nonfinite"}


@pytest.mark.parametrize("program", [lambda x: 1 / torch.expm1(x), lambda x: 1 / torch.nn.functional.elu(x)])
def test_the_sign_of_a_zero_that_decides_an_infinity_is_no_noise(program):
    """The zero keeps its sign in control runs, and float64 agrees with eager."""
    x = torch.tensor([-0.0, 0.0, 1.0, -1.0])

    loses_the_sign = faults.runs(
        lambda forward, *args: forward(*[arg + 0.0 if torch.is_tensor(arg) else arg for arg in args])
    )
    assert {finding.detail for finding in cb.check(program, (x,), compiler=loses_the_sign).findings} == {"nonfinite"}
    assert cb.check(program, (x,), compiler=faults.clean()).verdict is cb.Verdict.PASS
