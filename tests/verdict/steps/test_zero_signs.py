"""The sign of a zero that is handed out: found where the program computes it, not where it is noise."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import checked_backend as cb
from tests.support import faults
from tests.support.region_tools import checked, gathered

ZEROS = torch.tensor([-0.0, 0.0, 1.0, -1.0, -0.0])


def other_zeros(dtype_of_fault=None):
    def turned(tensor):
        if dtype_of_fault is not None and tensor.dtype is not dtype_of_fault:
            return tensor
        return torch.where(tensor == 0, -tensor, tensor)

    return faults.spoiled_output(turned)


COMPUTED = {
    "expm1": torch.expm1,
    "elu": F.elu,
    "product": lambda x: x * 0,
    "negative": torch.neg,
    "round": lambda x: (x * 0.3).round(),
    "complex": lambda x: torch.complex(x * 0, x * -0.0),
    "lazily conjugated": lambda x: torch.complex(x * 0, x * 0).conj(),
    "half": lambda x: torch.expm1(x.bfloat16()),
}
NOISE = {
    "cancels, complex": lambda x: torch.complex((x + 2) / 3 * 3 - (x + 2) * 1.0, x.clamp(min=0)),
    "cancels": lambda x: (x + 2) / 3 * 3 - (x + 2) * 1.0,
    "underflows": lambda x: x.abs().add(1e-30) * -1e-30,
    "maximum": lambda x: torch.maximum(x, -x),
    "clamp": lambda x: x.clamp(min=0),
    "greatest": lambda x: x.view(5, 1).amax(1).clamp_max(0),
}


@pytest.mark.parametrize("name", COMPUTED)
def test_a_sign_that_the_program_computes(name):
    report = cb.check(COMPUTED[name], (ZEROS,), compiler=other_zeros())
    assert {(finding.detail, finding.subject) for finding in report.findings} == {("logic.sign_of_zero", "output[0]")}
    assert report.verdict is cb.Verdict.FAIL
    assert "another sign" in report.findings[0].message
    assert {report.findings[0].expected.split()[0], report.findings[0].actual.split()[0]} == {"0.0", "-0.0"}
    assert cb.check(COMPUTED[name], (ZEROS,), compiler=faults.clean()).verdict is cb.Verdict.PASS


@pytest.mark.parametrize("name", NOISE)
def test_a_sign_that_is_noise(name):
    assert cb.check(NOISE[name], (ZEROS,), compiler=other_zeros()).findings == ()


@pytest.mark.parametrize(
    ("compiler", "found"),
    [(faults.wrong_operator("sigmoid", faults.last_bit), []), (other_zeros(), ["logic.sign_of_zero"])],
)
def test_what_is_drawn_by_computed_values_decides_the_sign(compiler, found):
    def drawn(x):
        return (torch.bernoulli(x.sigmoid()) - 0.5) * 0

    report = cb.check(drawn, (torch.linspace(-2, 2, 4000).bfloat16(),), compiler=compiler)
    assert [finding.detail for finding in report.findings] == found


def run(calls=1, **options):
    torch._dynamo.reset()
    compiled = checked(torch.expm1, other_zeros(), **options)
    return gathered(lambda: [compiled(ZEROS) for _ in range(calls)])


def test_numcheck_goes_on_and_can_be_told_to_ignore_it():
    report = run(calls=3)
    assert [finding.detail for finding in report.findings] == ["logic.sign_of_zero"]
    assert report.verdict is cb.Verdict.PASS
    assert run(ignore=("logic.sign_of_zero",)).findings == ()
    with pytest.raises(cb.DivergenceError, match="another sign"):
        run(layout="raise", on_divergence="raise")
