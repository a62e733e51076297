"""A mistake of the check's own is told in the coverage, and the user's program goes on with the candidate's results."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import checked_backend as cb
from checked_backend.errors import DivergenceWarning
from checked_backend.regions import backward, observers
from checked_backend.regions.compare_call import CallComparison
from tests.support import faults
from tests.support.raising import raising
from tests.support.region_tools import checked, gathered

X = torch.linspace(-1, 1, 12).view(3, 4)


def trained(compiled: Any) -> None:
    x = X.clone().requires_grad_()
    out = compiled(x)
    assert torch.equal(out, x.tanh() * 2)
    out.sum().backward()
    torch.testing.assert_close(x.grad, 2 * (1 - X.tanh() ** 2))


@pytest.mark.parametrize(
    ("owner", "name", "subject", "where"),
    [
        (observers.CallRecorder, "begin", "results", "copying what the check needs"),
        (CallComparison, "forward", "results", "comparing the results"),
        (backward, "was_written_to", "gradients", "copying the gradients that arrive"),
        (CallComparison, "backward", "gradients", "comparing the gradients"),
    ],
)
def test_the_program_goes_on_and_the_verdict_is_no_pass(
    owner: object,
    name: str,
    subject: str,
    where: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    compiled = checked(lambda x: x.tanh() * 2, "aot_eager", on_divergence="raise")
    random = torch.get_rng_state()
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, raising(ValueError("a slip in the check")))
        report = gathered(lambda: trained(compiled))
    assert torch.equal(torch.get_rng_state(), random)
    assert (report.verdict, report.findings) == (cb.Verdict.INCONCLUSIVE, ())
    (skip,) = [skip for skip in report.coverage.skipped if skip.matters]
    assert (skip.subject, skip.matters) == (subject, True)
    [known] = report.coverage.regions
    assert (known.calls, known.checked_calls, known.checked_backwards) == (1, int(subject == "gradients"), 0)
    assert skip.reason == (
        f"the check itself failed in {where}: ValueError: a slip in the check. This is a mistake of checked_backend: "
        "please report it"
    )
    assert f"the check itself failed in {where}" in caplog.text


def test_what_the_check_raises_on_purpose_reaches_the_program() -> None:
    wrong = faults.spoiled_output(lambda out: out + 1)
    with pytest.raises(cb.DivergenceError):
        checked(torch.tanh, wrong, on_divergence="raise")(X)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(DivergenceWarning):
            checked(torch.tanh, wrong, on_divergence="warn")(X)


def test_what_eager_raises_reaches_the_program() -> None:
    compiled = checked(lambda x, at: x[at] + 0, faults.instead(lambda *_args: X), on_divergence="fallback")
    with pytest.raises(IndexError):
        compiled(X, torch.tensor([7]))


@pytest.mark.parametrize("spoil", [faults.last_bit, lambda out: out * 1.01])
def test_the_check_makes_its_own_tensors_where_the_values_are(spoil: faults.Spoil) -> None:
    """Not on the device that the program has set for its own new tensors."""
    compiled, x = checked(lambda x: x.softmax(-1) / 3, faults.spoiled_output(spoil)), torch.randn(8, 8)
    with cb.collect() as session, torch.device("meta"):
        compiled(x)
    assert session.report.verdict is (cb.Verdict.PASS if spoil is faults.last_bit else cb.Verdict.FAIL)
