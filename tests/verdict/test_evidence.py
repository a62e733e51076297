"""Findings say what they know: kinds, words and evidence."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

import checked_backend as cb
from checked_backend.findings import Coverage, EvidenceKey, Kind
from checked_backend.verdict.decide import decide
from checked_backend.verdict.decisions import TensorPair
from checked_backend.verdict.runner import Runner, Values
from tests.support.scripted_controls import Make, Scripted, decided, exact, fused, missing


def test_precision_says_that_the_logic_is_right() -> None:
    [finding] = decided(Scripted(torch.float32, exact(), exact), exact() * (1 + 1e-4)).findings
    assert (finding.kind, finding.detail) == (Kind.PRECISION, "precision")
    assert finding.message.endswith("compiled in float64 it is right")


@pytest.mark.parametrize("off", [1e-4, 0.25], ids=["a lower precision might", "no precision would"])
@pytest.mark.parametrize("lost", [("twin",), ("float64",)])
def test_without_float64_the_size_tells_logic_from_precision(lost: tuple[str, ...], off: float) -> None:
    [finding] = decided(Scripted(torch.float32, exact(), exact, lost=lost), exact() * (1 + off)).findings
    assert finding.kind is (Kind.PRECISION if off < 0.1 else Kind.LOGIC)
    assert ("further from float64" in finding.message) is (lost == ("twin",))
    assert finding.evidence.get("float64_twin_missing") == ("MissingError: not here" if lost == ("twin",) else None)
    assert ("neither a float64 reference" in finding.message) is (lost == ("float64",))
    assert "compiled in float64" not in finding.message


def test_no_control_at_all_is_inconclusive() -> None:
    controls = Scripted(torch.float32, exact(), exact, lost=("repeat", "monte_carlo", "float64"))
    decisions = decided(controls, exact() * 1.001)
    assert [str(finding.kind) for finding in decisions.findings] == ["unsupported"]
    assert any(skip.matters for skip in decisions.skips)


def test_nonfinite_speaks_of_float64_only_if_it_ran() -> None:
    wrong = with_nan(exact())
    [with_float64] = decided(Scripted(torch.float32, exact(), exact), wrong).findings
    [without] = decided(Scripted(torch.float32, exact(), exact, lost=("float64",)), wrong).findings
    assert {with_float64.kind, without.kind} == {Kind.NONFINITE}
    assert "eager and float64 have none" in with_float64.message
    assert "where eager has none" in without.message


def right() -> torch.Tensor:
    return exact().float()


def test_other_random_numbers() -> None:
    given: dict[str, Any] = {"lost": ("twin",), "replayed": right, "alone": lambda: exact().flip(0)}
    controls = Scripted(torch.float32, exact(), missing, **given)
    assert [finding.detail for finding in decided(controls, exact().flip(0)).findings] == ["rng.stream"]


@pytest.mark.parametrize("others", [None, "its state moves"])
def test_once_only_is_another_threads_doing_on_evidence(others: str | None) -> None:
    controls = Scripted(torch.float32, exact(), exact, replayed=right, alone=right, others=others)
    decisions = decided(controls, exact().flip(0) * 1e6)
    reasons = ["another thread drew random numbers: its state moves"] if others else []
    assert [skip.reason for skip in decisions.skips if skip.matters] == reasons
    assert len(decisions.findings) == (not others)


@pytest.mark.parametrize("others", [None, "its state moves"])
def test_a_thread_that_draws_beside_eager_alone_explains_as_much(others: str | None) -> None:
    """The candidate repeats. Eager does not: it drew other numbers in the checked call than in a run by itself."""

    def rolled() -> torch.Tensor:
        return exact().roll(8)

    more: dict[str, Any] = {"left_alone": right, "replayed": lambda: rolled().float(), "alone": right, "others": others}
    decisions = decided(Scripted(torch.float32, rolled(), rolled, **more), exact())
    assert [finding.detail for finding in decisions.findings] == ([] if others else ["rng.stream"])
    assert any(skip.matters for skip in decisions.skips) == (others is not None)


EVERY = {
    EvidenceKey.EAGER_REPEATS,
    EvidenceKey.EAGER_DISTANCE,
    EvidenceKey.CANDIDATE_DISTANCE,
    EvidenceKey.TWIN_ERROR,
    EvidenceKey.DIFFERENCE_REPEATS,
    EvidenceKey.ELEMENTS_OUTSIDE_NOISE,
}


def with_nan(values: torch.Tensor) -> torch.Tensor:
    values[3] = float("nan")
    return values


@pytest.mark.parametrize(
    ("kind", "twin", "candidate", "own"),
    [
        ("logic", lambda: exact() * 1.01, lambda: exact() * 1.01, None),
        ("precision", exact, lambda: exact() * 1.0001, None),
        ("nonfinite", exact, lambda: with_nan(exact()), None),
        ("mutation", lambda: exact() * 1.01, lambda: exact() * 1.01, Kind.MUTATION),
    ],
)
def test_finding_has_all_of_its_evidence(kind: str, twin: Make, candidate: Make, own: Kind | None) -> None:
    controls = Scripted(torch.float32, exact(), twin, alone=lambda: candidate().float())
    [finding] = decided(controls, candidate(), kind=own).findings
    assert str(finding.kind) == kind
    assert set(finding.evidence) == EVERY
    assert finding.evidence["difference_repeats"] == "in 2 of 2 more runs of the candidate"
    assert finding.noise.rms > 0
    assert finding.noise.source.startswith("Monte Carlo arithmetic on eager, ")
    assert finding.noise.source.endswith("float64 reference, float64 twin")
    report = cb.Report((finding,), Coverage(checked={"tensors": 1}))
    words, kept = " ".join(report.to_text(verbose=True).split()), json.loads(report.to_json())["findings"][0]
    assert "Monte Carlo arithmetic on eager" in words
    assert kept["noise"]["rms"] == finding.noise.rms
    for name in EVERY:
        assert name.phrase in words
        assert kept["evidence"][name.value] == finding.evidence[name]
    assert cb.Report.from_json(report.to_json()).findings[0].evidence == dict(finding.evidence)


def test_tensor_that_never_differs_waits_while_another_is_looked_at_closely() -> None:
    """The strong control runs are for the other one; this one has nothing outside of its noise, and nothing jumps."""
    pairs = [
        TensorPair("output[0]", "output[0]", right(), (exact() * 1.0001).float()),
        TensorPair("output[1]", "output[1]", right(), (exact() * (1 + 1e-7)).float()),
    ]
    first = Scripted(torch.float32, exact(), lambda: exact() * (1 + 1e-8))

    class Both(Scripted):
        """Gives each output the same."""

        def _give(self, name: str, make: Make) -> Values:
            values = super()._give(name, make)
            return {"output[0]": exact() if name == "twin" else values["output[0]"], "output[1]": values["output[0]"]}

    both: Runner = Both(first.dtype, first.right, first.twin_value)
    found = decide(pairs, lambda: both, {}, thorough=True).findings
    assert [(str(each.kind), each.subject) for each in found] == [("precision", "output[0]"), ("logic", "output[1]")]


def test_what_the_candidate_does_once_is_no_rounding_of_fused_kernels() -> None:
    halved = exact().bfloat16
    [finding] = decided(Scripted(torch.bfloat16, exact(), exact, unfused_value=halved, alone=halved), fused()).findings
    assert finding.evidence["difference_repeats"] == "in 0 of 2 more runs of the candidate"


def test_eager_that_does_not_repeat_itself() -> None:
    spread = exact() * 1.5
    controls = Scripted(torch.float32, exact(), lambda: exact() * 2, again=lambda: spread.float(), jumps=(1, 2))
    [finding] = decided(controls, exact() * 1.25).findings
    assert finding.kind is Kind.NONDETERMINISTIC
    assert finding.evidence["eager_spread"] > 0.5
