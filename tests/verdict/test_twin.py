"""Equal bits in half precision, where the float64 twin decides; and when the twin itself is not to be believed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from checked_backend.findings import Kind
from checked_backend.verdict import elements
from checked_backend.verdict.decide import decide
from checked_backend.verdict.decisions import TensorPair
from checked_backend.verdict.envelope import Envelope
from checked_backend.verdict.steps.float64 import twin_difference
from tests.support.raising import raising
from tests.support.scripted_controls import Scripted, decided, exact

# equal bits in half precision: the twin decides


@pytest.mark.parametrize("thorough", [True, False], ids=["check", "numcheck"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_twin_finds_what_equal_bits_hide(dtype: torch.dtype, thorough: bool) -> None:
    wrong = exact() * (1 + 1e-5)
    decisions = decided(Scripted(dtype, exact(), lambda: wrong), exact(), thorough=thorough)
    [finding] = decisions.findings
    assert finding.kind is Kind.LOGIC
    assert finding.metrics.bitwise_equal
    assert "hides that bit for bit" in finding.message
    assert decisions.scales == {}


def test_equal_bits_and_an_equal_twin_pass_and_are_not_asked_again() -> None:
    controls = Scripted(torch.bfloat16, exact(), exact)
    decisions = decided(controls, exact())
    assert (decisions.findings, decisions.skips, decisions.notes) == ([], [], [])
    assert decisions.limits["output[0]"] == 1e-9
    assert controls.asked["twin"] == 1
    assert "monte_carlo" not in controls.asked  # nothing differs, so no noise is needed
    pair = TensorPair("output[0]", "output[0]", exact().to(torch.bfloat16), exact().to(torch.bfloat16))
    no_run = raising(AssertionError("steady state makes no control run"))
    again = decide([pair], no_run, decisions.scales, thorough=True, low_precision=True)
    assert (again.findings, again.compared) == ([], 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_bits_of_a_program_in_full_precision_need_no_twin(dtype: torch.dtype) -> None:
    controls = Scripted(dtype, exact(), lambda: exact() * 2)
    assert decided(controls, exact(), low_precision=False).findings == []
    assert controls.asked == {}


def test_result_in_float32_of_a_region_in_half_precision_is_asked_for_too() -> None:
    controls = Scripted(torch.float32, exact(), lambda: exact() * (1 + 1e-4), noise=2.0**16)
    assert [str(finding.kind) for finding in decided(controls, exact(), low_precision=True).findings] == ["logic"]


def test_equal_bits_without_a_twin_pass_with_less_power() -> None:
    decisions = decided(Scripted(torch.bfloat16, exact(), exact, lost=("twin",)), exact())
    assert decisions.findings == []
    assert [skip.subject for skip in decisions.skips] == ["control: float64 twin"]
    assert decisions.limits["output[0]"] == torch.finfo(torch.bfloat16).eps


def test_integers_of_a_region_in_half_precision_are_not_asked_for() -> None:
    controls = Scripted(torch.int64, exact() * 100, exact)
    assert decided(controls, exact() * 100, low_precision=True).findings == []
    assert controls.asked == {}


# when the twin itself is not to be believed


def spiked(by: float) -> torch.Tensor:
    wrong = exact()
    wrong[7] += by
    return wrong


def test_twin_wrong_where_the_candidate_is_visibly_right_is_not_believed() -> None:
    decisions = decided(Scripted(torch.bfloat16, exact(), lambda: spiked(1.0)), exact())
    assert decisions.findings == []
    assert ["the float64 twin was not used" in note for note in decisions.notes] == [True]


def test_twin_of_another_shape_is_not_used_and_that_is_said() -> None:
    decisions = decided(Scripted(torch.bfloat16, exact(), lambda: exact()[1:]), exact())
    assert decisions.findings == []
    assert ["has another shape" in note for note in decisions.notes] == [True]
    assert decisions.limits["output[0]"] > 1e-3  # and the power is not the twin's


def test_twin_wrong_where_the_candidate_is_wrong_is_believed() -> None:
    decisions = decided(Scripted(torch.bfloat16, exact(), lambda: spiked(1.0)), spiked(1.0))
    assert [(str(f.kind), "hides" in f.message) for f in decisions.findings] == [("logic", False)]


def test_twin_wrong_within_the_noise_is_believed() -> None:
    candidate = spiked(2.0**-7)
    [finding] = decided(Scripted(torch.bfloat16, exact(), lambda: spiked(2.0**-7)), candidate).findings
    assert finding.message.endswith("; the noise of bfloat16 hides how wrong")


@pytest.mark.parametrize(("jumps", "kinds"), [((), ["logic"]), ((1,), []), ((6,), []), ((10,), [])])
def test_what_jumps_in_float64_too_is_not_the_twins_fault(jumps: tuple[int, ...], kinds: list[str]) -> None:
    """A tie that few of the control runs break: more are made before the twin is believed."""
    controls = Scripted(torch.float32, exact(), lambda: spiked(0.1), jumps=jumps, noise=1e6)
    decisions = decided(controls, exact() * (1 + 1e-3))
    assert [str(finding.kind) for finding in decisions.findings] == kinds
    assert controls.asked["float64_noise"] == (2 if jumps == (1,) else 10)


# what is allowed of each element


def double(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_subnormal_numbers_have_no_relative_difference():
    right = double(0.75, 6.5308907e-317)
    found = twin_difference(high_precision=right, twin=right + double(0, 5e-324), envelope=Envelope(double(1e-16, 0)))
    assert not found.differs


def test_what_cancels_inside_of_a_kernel_leaves_roundings_of_its_terms():
    right, left_over = double(1.0, 2.0, 1e-16), double(0.0, 0.0, 1e-16)
    quiet = Envelope(double(0, 0, 0))
    assert not twin_difference(high_precision=right, twin=right + left_over, envelope=quiet).differs
    assert twin_difference(high_precision=right, twin=right + 1e3 * left_over, envelope=quiet).differs


@pytest.mark.parametrize(("off", "differs"), [(0, False), (1, False), (2, True)])
def test_an_element_that_jumps_in_float64_lends_no_noise_to_others(off, differs):
    right = torch.ones(40, dtype=torch.float64)
    first, further = Envelope(torch.full((40,), 1e-16)), Envelope(torch.full((40,), 1e-15))
    further.values[:2] = 0.5
    twin = right.clone()
    twin[off] += 0.4
    assert twin_difference(high_precision=right, twin=twin, envelope=first, further=further).differs == differs


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_how_many_blocks_a_twin_has_does_not_matter(dtype, monkeypatch):
    right = torch.randn(40, 25, dtype=dtype) ** 3
    for wrong in (None, 0, 511, 999):
        twin = right * (1 + 1e-16 * torch.randn(right.shape))
        if wrong is not None:
            twin.view(-1)[wrong] += 1e-3
        found = []
        for size in (7, 512, 1 << 20):
            monkeypatch.setattr(elements, "_BLOCK", size)
            found.append(twin_difference(high_precision=right, twin=twin, envelope=None))
        assert {replace(one, ratio=0.0) for one in found} == {replace(found[0], ratio=0.0)}
        assert [one.ratio for one in found] == pytest.approx([found[0].ratio] * 3)  # processors divide blocks otherwise
        assert found[0].differs == (wrong is not None)
