"""Rulings on scripted evidence: each layer settles what it should and nothing else, and findings say what they know."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

import pytest
import torch

import checked_backend as cb
from checked_backend.findings import Coverage, Kind
from checked_backend.report import Report
from checked_backend.verdict.control_runs import Control, ControlRuns, Values
from checked_backend.verdict.decide import decide
from checked_backend.verdict.decisions import Decisions, TensorPair
from checked_backend.verdict.envelope import NoiseBaseline

Make = Callable[[], torch.Tensor]


class MissingError(Exception):
    """What a control raises that cannot run."""


def missing() -> torch.Tensor:
    raise MissingError("not here")


@dataclass
class Scripted:
    """Controls that return what a test says, and count how often each is asked.

    Attributes:
        dtype: Of the program.
        right: The exact result.
        twin_value: What the twin computes.
        again: What eager gives when it runs again.
        left_alone: The same without any mode, where that is another.
        replayed: What the candidate gives on recorded random numbers.
        alone: What it gives when it runs again.
        recompiled_value: What it gives when it is compiled once more; None if it cannot be.
        unfused_value: What it gives when it rounds wherever eager does; None if its compiler cannot.
        others: What shows that another thread drew random numbers.
        jumps: In which float64 control runs the result jumps.
        jump: By how much.
        drift: By how much float64 differs from run to run.
        lost: ControlRuns that cannot run.
        blind_spots: Operators that control runs left out.
        asked: How often each control was asked.
    """

    dtype: torch.dtype
    right: torch.Tensor
    twin_value: Make
    again: Make | None = None
    left_alone: Make | None = None
    replayed: Make | None = None
    alone: Make | None = None
    recompiled_value: Make | None = None
    unfused_value: Make | None = None
    others: str | None = None
    jumps: tuple[int, ...] = ()
    jump: float = 1.0
    drift: float = 0.0
    lost: tuple[str, ...] = ()
    noise: float = 1.0
    blind_spots: Mapping[Control, Collection[str]] = field(default_factory=dict)
    asked: dict[str, int] = field(default_factory=dict)

    def _give(self, name: str, make: Make) -> Values:
        self.asked[name] = self.asked.get(name, 0) + 1
        if name in self.lost:
            raise MissingError("not here")
        return {"output[0]": make()}

    def _own(self, value: torch.Tensor) -> torch.Tensor:
        return value.to(self.dtype)

    def repeat(self, junk: int = 1) -> Values:
        return self._give("repeat", self.again or (lambda: self._own(self.right)))

    def bare(self) -> Values:
        return self._give("bare", self.left_alone or self.again or (lambda: self._own(self.right)))

    def replay_candidate(self) -> Values:
        return self._give("repeat_candidate", self.replayed or missing)

    def rerun_candidate(self) -> Values:
        return self._give("candidate_alone", self.alone or missing)

    def reseeded(self, seed: int) -> Values:
        return self._give("reseeded", lambda: self._own(exact().flip(0) * (1 + seed / 100)))

    def others_drew(self) -> str | None:
        return self.others

    def monte_carlo(self, seed: int, magnitude: float, *, replay_choices: bool = False) -> Values:
        def make() -> torch.Tensor:
            xi = torch.rand(self.right.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
            roundoff = torch.finfo(self.dtype if self.dtype.is_floating_point else torch.float32).eps / 2
            return self._own(self.right * (1 + self.noise * magnitude * roundoff * (2 * xi - 1)))

        return self._give("monte_carlo", make)

    def one_zero(self, *, negative: bool) -> Values:
        raise MissingError("not here")

    def draws(self) -> bool:
        return self.replayed is not None

    def draws_by_values(self) -> tuple[str, ...]:
        return ()

    def left_out(self) -> Mapping[Control, Collection[str]]:
        return self.blind_spots

    def flips(self, *, in_float64: bool = False) -> bool:
        return False

    def with_fixed_choices(self) -> None:
        return None

    def high_precision(self, seed: int | None, *, magnitude: float = 1.0, replay_choices: bool = False) -> Values:
        if seed is None:
            return self._give("high_precision", lambda: self.right + self.drift * self.asked["high_precision"])
        return self._give("float64 noise", lambda: self.right + (self.jump if seed in self.jumps else 1e-16))

    def twin(self) -> Values:
        return self._give("twin", self.twin_value)

    def recompiled(self) -> Values | None:
        return None if self.recompiled_value is None else self._give("recompiled", self.recompiled_value)

    def unfused(self) -> Values | None:
        return None if self.unfused_value is None else self._give("unfused", self.unfused_value)


def exact() -> torch.Tensor:
    return torch.linspace(1, 2, 64, dtype=torch.float64)


def judged(
    controls: Scripted,
    candidate: torch.Tensor,
    *,
    kind: Kind | None = None,
    known: dict[str, NoiseBaseline] | None = None,
    thorough: bool = True,
    low_precision: bool | None = None,
    reference: torch.Tensor | None = None,
) -> Decisions:
    given = controls.right.to(controls.dtype) if reference is None else reference
    low = controls.dtype in (torch.bfloat16, torch.float16) if low_precision is None else low_precision
    pair = TensorPair("output[0]", "output[0]", given, candidate.to(controls.dtype), kind, "")
    made: ControlRuns = controls
    return decide([pair], lambda: made, {} if known is None else known, thorough=thorough, low_precision=low)


# equal bits in half precision: the twin decides


@pytest.mark.parametrize("thorough", [True, False], ids=["check", "numcheck"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_twin_finds_what_equal_bits_hide(dtype: torch.dtype, thorough: bool) -> None:
    wrong = exact() * (1 + 1e-5)
    decisions = judged(Scripted(dtype, exact(), lambda: wrong), exact(), thorough=thorough)
    [finding] = decisions.findings
    assert finding.kind is Kind.LOGIC
    assert finding.metrics is not None
    assert finding.metrics.bitwise_equal
    assert "hides that bit for bit" in finding.message
    assert decisions.scales == {}


def test_equal_bits_and_an_equal_twin_pass_and_are_not_asked_again() -> None:
    controls = Scripted(torch.bfloat16, exact(), exact)
    decisions = judged(controls, exact())
    assert (decisions.findings, decisions.skips, decisions.notes) == ([], [], [])
    assert decisions.limits["output[0]"] == 1e-9
    assert controls.asked["twin"] == 1
    assert "monte_carlo" not in controls.asked  # nothing differs, so no noise is needed

    def fail() -> ControlRuns:
        raise AssertionError("steady state makes no control run")

    pair = TensorPair("output[0]", "output[0]", exact().to(torch.bfloat16), exact().to(torch.bfloat16))
    again = decide([pair], fail, decisions.scales, thorough=True, low_precision=True)
    assert (again.findings, again.compared) == ([], 1)


@pytest.mark.parametrize(("dtype", "low"), [(torch.float32, False), (torch.float64, False)])
def test_equal_bits_of_a_program_in_full_precision_need_no_twin(dtype: torch.dtype, low: bool) -> None:
    controls = Scripted(dtype, exact(), lambda: exact() * 2)
    assert judged(controls, exact(), low_precision=low).findings == []
    assert controls.asked == {}


def test_result_in_float32_of_a_region_in_half_precision_is_asked_for_too() -> None:
    controls = Scripted(torch.float32, exact(), lambda: exact() * (1 + 1e-4), noise=2.0**16)
    assert [str(finding.kind) for finding in judged(controls, exact(), low_precision=True).findings] == ["logic"]


def test_equal_bits_without_a_twin_pass_with_less_power() -> None:
    decisions = judged(Scripted(torch.bfloat16, exact(), exact, lost=("twin",)), exact())
    assert decisions.findings == []
    assert [skip.subject for skip in decisions.skips] == ["control: float64 twin"]
    assert decisions.limits["output[0]"] == torch.finfo(torch.bfloat16).eps


def test_integers_of_a_region_in_half_precision_are_not_asked_for() -> None:
    controls = Scripted(torch.int64, exact() * 100, exact)
    assert judged(controls, exact() * 100, low_precision=True).findings == []
    assert controls.asked == {}


# when the twin itself is not to be believed


def spiked(by: float) -> torch.Tensor:
    wrong = exact()
    wrong[7] += by
    return wrong


def test_twin_wrong_where_the_candidate_is_visibly_right_is_not_believed() -> None:
    decisions = judged(Scripted(torch.bfloat16, exact(), lambda: spiked(1.0)), exact())
    assert decisions.findings == []
    assert ["the float64 twin was not used" in note for note in decisions.notes] == [True]


def test_twin_of_another_shape_is_not_used_and_that_is_said() -> None:
    decisions = judged(Scripted(torch.bfloat16, exact(), lambda: exact()[1:]), exact())
    assert decisions.findings == []
    assert ["has another shape" in note for note in decisions.notes] == [True]
    assert decisions.limits["output[0]"] > 1e-3  # and the power is not the twin's


def test_twin_wrong_where_the_candidate_is_wrong_is_believed() -> None:
    decisions = judged(Scripted(torch.bfloat16, exact(), lambda: spiked(1.0)), spiked(1.0))
    assert [(str(f.kind), "hides" in f.message) for f in decisions.findings] == [("logic", False)]


def test_twin_wrong_within_the_noise_is_believed() -> None:
    candidate = spiked(2.0**-7)
    decisions = judged(Scripted(torch.bfloat16, exact(), lambda: spiked(2.0**-7)), candidate)
    [finding] = decisions.findings
    assert finding.message.endswith("; the noise of bfloat16 hides how wrong")


@pytest.mark.parametrize(("jumps", "kinds"), [((), ["logic"]), ((1,), []), ((6,), []), ((10,), [])])
def test_what_jumps_in_float64_too_is_not_the_twins_fault(jumps: tuple[int, ...], kinds: list[str]) -> None:
    """A tie that few of the control runs break: more are made before the twin is believed."""
    controls = Scripted(torch.float32, exact(), lambda: spiked(0.1), jumps=jumps, noise=1e6)
    decisions = judged(controls, exact() * (1 + 1e-3))
    assert [str(finding.kind) for finding in decisions.findings] == kinds
    assert controls.asked["float64 noise"] == (2 if jumps == (1,) else 10)


# kinds and words


def test_precision_says_that_the_logic_is_right() -> None:
    [finding] = judged(Scripted(torch.float32, exact(), exact), exact() * (1 + 1e-4)).findings
    assert finding.kind is Kind.PRECISION
    assert finding.message.endswith("compiled in float64 it is right")


@pytest.mark.parametrize("off", [1e-4, 0.25], ids=["a lower precision might", "no precision would"])
@pytest.mark.parametrize("lost", [("twin",), ("high_precision",)])
def test_without_float64_the_size_tells_logic_from_precision(lost: tuple[str, ...], off: float) -> None:
    [finding] = judged(Scripted(torch.float32, exact(), exact, lost=lost), exact() * (1 + off)).findings
    assert finding.kind is (Kind.PRECISION if off < 0.1 else Kind.LOGIC)
    assert ("further from float64" in finding.message) is (lost == ("twin",))
    assert ("neither a float64 reference" in finding.message) is (lost == ("high_precision",))
    assert "compiled in float64" not in finding.message


def test_no_control_at_all_is_inconclusive() -> None:
    controls = Scripted(torch.float32, exact(), exact, lost=("repeat", "monte_carlo", "high_precision"))
    decisions = judged(controls, exact() * 1.001)
    assert [str(finding.kind) for finding in decisions.findings] == ["unsupported"]
    assert any(skip.matters for skip in decisions.skips)


def test_nonfinite_speaks_of_float64_only_if_it_ran() -> None:
    wrong = exact()
    wrong[3] = float("nan")
    [with_float64] = judged(Scripted(torch.float32, exact(), exact), wrong).findings
    [without] = judged(Scripted(torch.float32, exact(), exact, lost=("high_precision",)), wrong).findings
    assert {with_float64.kind, without.kind} == {Kind.NONFINITE}
    assert "eager and float64 have none" in with_float64.message
    assert "where eager has none" in without.message


def test_other_random_numbers() -> None:
    controls = Scripted(
        torch.float32, exact(), missing, lost=("twin",), replayed=lambda: exact().float(), alone=lambda: exact().flip(0)
    )
    assert [finding.detail for finding in judged(controls, exact().flip(0)).findings] == ["rng.stream"]


@pytest.mark.parametrize("others", [None, "its state moves"])
@pytest.mark.parametrize("size", [1.0, 1e6])
def test_once_only_is_another_threads_doing_on_evidence(others: str | None, size: float) -> None:
    """And only if other random numbers make differences of that size at all."""

    def right() -> torch.Tensor:
        return exact().float()

    controls = Scripted(torch.float32, exact(), exact, replayed=right, alone=right, others=others)
    decisions = judged(controls, exact().flip(0) * size)
    excused = others is not None and size == 1.0
    assert [skip.reason for skip in decisions.skips if skip.matters] == (
        ["another thread drew random numbers: its state moves"] if excused else []
    )
    assert len(decisions.findings) == (not excused)


# fused kernels that round less


def fused() -> torch.Tensor:
    """Beyond the noise of `exact`, and further from float64 than eager."""
    return exact() * (1 + 2.0**-4)


def test_rounding_of_fused_kernels_is_a_note() -> None:
    controls = Scripted(torch.bfloat16, exact(), exact, unfused_value=lambda: exact().to(torch.bfloat16))
    decisions = judged(controls, fused())
    assert decisions.findings == []
    [note] = decisions.notes
    assert note.startswith("fusion-rounding: output[0] differs from eager by 0.125")
    assert controls.asked["unfused"] == 1


def test_what_remains_without_fused_rounding_is_a_finding() -> None:
    controls = Scripted(torch.bfloat16, exact(), exact, unfused_value=lambda: fused().to(torch.bfloat16))
    decisions = judged(controls, fused())
    assert [finding.detail for finding in decisions.findings] == ["logic.this_dtype"]
    assert decisions.notes == []


def test_wrong_logic_is_not_excused_by_fusion() -> None:
    controls = Scripted(torch.bfloat16, exact(), fused, unfused_value=lambda: exact().to(torch.bfloat16))
    assert [str(finding.kind) for finding in judged(controls, fused()).findings] == ["logic"]
    assert "unfused" not in controls.asked


def test_full_precision_and_compilers_without_the_mode_are_not_compiled_once_more() -> None:
    controls = Scripted(torch.float32, exact(), exact, unfused_value=lambda: exact().float())
    assert [str(finding.kind) for finding in judged(controls, exact() * 1.001).findings] == ["precision"]
    assert "unfused" not in controls.asked
    half = Scripted(torch.bfloat16, exact(), exact)
    assert [finding.detail for finding in judged(half, fused()).findings] == ["logic.this_dtype"]


# wrong by more than precision, with a float64 twin that is right


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("factor", [2.0, 0.0, 1.5])
@pytest.mark.parametrize(
    ("recheck", "detail"), [(None, "this_dtype"), ("wrong", "this_dtype"), ("right", "this_compilation")]
)
def test_what_is_a_multiple_of_eagers_is_no_precision(
    dtype: torch.dtype, factor: float, recheck: str | None, detail: str
) -> None:
    controls = Scripted(dtype, exact(), exact)
    if recheck is not None:
        controls.recompiled_value = lambda: (exact() * (factor if recheck == "wrong" else 1)).to(dtype)
    [finding] = judged(controls, exact() * factor).findings
    assert (finding.kind, finding.detail) == (Kind.LOGIC, f"logic.{detail}")
    assert "rounding" in finding.message or "compiled by itself" in finding.message


def test_what_the_candidate_gives_once_only_is_wrong_in_this_call() -> None:
    controls = Scripted(torch.float32, exact(), exact, alone=lambda: exact().float())
    [finding] = judged(controls, exact() * 1.001).findings
    assert (finding.kind, finding.detail) == (Kind.LOGIC, "logic.this_call")


def test_rounding_to_less_is_precision() -> None:
    controls = Scripted(torch.float32, exact(), exact)
    [finding] = judged(controls, exact().half()).findings
    assert finding.detail == "precision"


# evidence

EVERY = {
    "eager repeats itself",
    "eager's distance from float64, rms",
    "candidate's distance from float64, rms",
    "float64 twin differs from float64 reference, relative",
    "the difference repeats",
    "elements outside of the noise",
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
    [finding] = judged(controls, candidate(), kind=own).findings
    assert str(finding.kind) == kind
    assert set(finding.evidence) == EVERY
    assert finding.evidence["the difference repeats"] == "in 2 of 2 more runs of the candidate"
    assert finding.noise is not None
    assert finding.noise.rms > 0
    assert finding.noise.source.startswith("Monte Carlo arithmetic on eager, ")
    assert finding.noise.source.endswith("float64 reference, float64 twin")
    report = Report((finding,), Coverage(checked={"tensors": 1}))
    words, kept = " ".join(str(report).split()), json.loads(report.to_json())["findings"][0]
    assert "Monte Carlo arithmetic on eager" in words
    assert kept["noise"]["rms"] == finding.noise.rms
    for name in EVERY:
        assert name in words
        assert kept["evidence"][name] == finding.evidence[name]
    assert cb.Report.from_json(report.to_json()).findings[0].evidence == dict(finding.evidence)


def test_tensor_that_never_differs_waits_while_another_is_looked_at_closely() -> None:
    """The strong control runs are for the other one; this one has nothing outside of its noise, and nothing jumps."""
    same = exact().float()
    pairs = [
        TensorPair("output[0]", "output[0]", same, (exact() * 1.0001).float()),
        TensorPair("output[1]", "output[1]", same, (exact() * (1 + 1e-7)).float()),
    ]
    first = Scripted(torch.float32, exact(), lambda: exact() * (1 + 1e-8))

    class Both(Scripted):
        """Gives each output the same."""

        def _give(self, name: str, make: Make) -> Values:
            values = super()._give(name, make)
            right = name == "twin"
            return {"output[0]": exact() if right else values["output[0]"], "output[1]": values["output[0]"]}

    both: ControlRuns = Both(first.dtype, first.right, first.twin_value)
    found = decide(pairs, lambda: both, {}, thorough=True).findings
    assert [(str(each.kind), each.subject) for each in found] == [("precision", "output[0]"), ("logic", "output[1]")]


def test_what_the_candidate_does_once_is_no_rounding_of_fused_kernels() -> None:
    def right() -> torch.Tensor:
        return exact().to(torch.bfloat16)

    controls = Scripted(torch.bfloat16, exact(), exact, unfused_value=right, alone=right)
    [finding] = judged(controls, fused()).findings
    assert finding.evidence["the difference repeats"] == "in 0 of 2 more runs of the candidate"


def test_difference_that_does_not_repeat_says_so() -> None:
    controls = Scripted(torch.float32, exact(), exact, alone=lambda: exact().float())
    [finding] = judged(controls, exact() * 1.0001).findings
    assert finding.evidence["the difference repeats"] == "in 0 of 2 more runs of the candidate"


def test_missing_control_is_in_the_evidence() -> None:
    [finding] = judged(Scripted(torch.float32, exact(), exact, lost=("twin",)), exact() * 1.0001).findings
    assert finding.evidence["float64 twin could not run"] == "MissingError: not here"


def test_eager_that_does_not_repeat_itself() -> None:
    spread = exact() * 1.5
    controls = Scripted(torch.float32, exact(), lambda: exact() * 2, again=lambda: spread.float(), jumps=(1, 2))
    [finding] = judged(controls, exact() * 1.25).findings
    assert finding.kind is Kind.NONDETERMINISTIC
    assert finding.evidence["eager's own spread between two runs, rms"] > 0.5


# what noise hides


def mixed() -> torch.Tensor:
    """Numbers around 1000, and as many around 1e-3: a root mean square knows the first ones only."""
    return torch.cat([exact() * 1e3, exact() * 1e-3])


@pytest.mark.parametrize("wrong", [0.0, 1.01], ids=["zero", "one percent"])
@pytest.mark.parametrize("rest", [1.0, 1 + 1.2e-7], ids=["the rest is equal", "the rest is off by a rounding"])
def test_small_elements_are_not_lost_in_the_noise_of_large_ones(wrong: float, rest: float) -> None:
    candidate = torch.cat([exact() * 1e3 * rest, exact() * 1e-3 * wrong])
    controls = Scripted(torch.float32, mixed(), lambda: candidate)
    [finding] = judged(controls, candidate, thorough=False).findings
    assert finding.kind is Kind.LOGIC
    assert finding.metrics is not None
    clean = Scripted(torch.float32, mixed(), mixed)
    assert judged(clean, mixed() * rest, thorough=False).findings == []
    assert "high_precision" not in clean.asked  # rounding alone asks nothing of float64


def noisy(noise: float) -> float:
    """The same in roundoffs of float32."""
    return noise * 2**24


@pytest.mark.parametrize("noise", [0.01, 0.5, 4.0])
def test_float64_tells_what_large_noise_hides(noise: float) -> None:
    wrong = Scripted(torch.float32, exact(), lambda: exact() * 1.1, noise=noisy(noise))
    assert [str(f.kind) for f in judged(wrong, exact() * 1.1, thorough=False).findings] == ["logic"]
    right = Scripted(torch.float32, exact(), exact, noise=noisy(noise))
    decisions = judged(right, exact() * 1.1, thorough=False)
    assert (decisions.findings, decisions.skips) == ([], [])
    assert decisions.limits["output[0]"] < 1e-9 * 1.01


@pytest.mark.parametrize("lost", ["twin", "high_precision"])
def test_what_noise_hides_wholly_is_not_judged_without_float64(lost: str) -> None:
    decisions = judged(Scripted(torch.float32, exact(), exact, noise=noisy(0.5), lost=(lost,)), exact() * 1.1)
    assert decisions.findings == []
    [skip] = [skip for skip in decisions.skips if skip.matters]
    assert skip.subject == "output[0]"
    assert "would hide an error of 100 %" in skip.reason
    assert ("float64 twin" if lost == "twin" else "high-precision reference") in skip.reason
    small = judged(Scripted(torch.float32, exact(), exact, noise=noisy(0.01), lost=(lost,)), exact() * 1.001)
    assert not any(skip.matters for skip in small.skips)
    assert 0.01 < small.limits["output[0]"] < 0.2


def test_zero_but_for_rounding_is_judged_by_its_size() -> None:
    """The gradient of a bias before a normalisation: nothing is left of it in float64, and no twin is compiled."""
    rounding = torch.linspace(-1, 1, 64) * 1e-8
    controls = Scripted(torch.float32, exact() * 1e-18, exact, again=lambda: rounding, noise=noisy(1e10))
    decisions = judged(controls, rounding.flip(0) * 2, thorough=False, reference=rounding)
    assert (decisions.findings, decisions.skips) == ([], [])
    assert "twin" not in controls.asked
    scale = decisions.scales["output[0]"]

    def again(reference: torch.Tensor, candidate: torch.Tensor) -> int:
        asked = Scripted(torch.float32, exact() * 1e-18, exact, noise=noisy(1e10))
        judged(asked, candidate, thorough=False, reference=reference, known={"output[0]": scale})
        return len(asked.asked)

    assert again(rounding * 2, rounding.flip(0) * 2) == 0  # rounding of the size that was seen
    assert again(rounding * 1e6, rounding.flip(0) * 1e6) > 0  # now it is something


def test_rounding_that_changes_its_size_is_judged_anew_ever_more_seldom() -> None:
    """The gradient of a bias before a normalisation: nothing but rounding, small in one call and large in the next."""
    known: dict[str, NoiseBaseline] = {}
    heard = []
    for call in range(60):
        size = 10.0 ** ((call * 0.618) % 1 * 3)
        rounding = torch.randn(64, generator=torch.Generator().manual_seed(call)) * 1e-8 * size
        controls = Scripted(torch.float32, exact() * 1e-18 * size, lambda: exact() * 1e-18, noise=noisy(1e10))
        decisions = judged(controls, rounding.flip(0), thorough=False, reference=rounding, known=known)
        assert decisions.findings == []
        for name, scale in decisions.scales.items():
            known[name] = scale.widened(known.get(name))
        heard += [call] if controls.asked else []
    assert len(heard) <= 6
    assert max(heard) < 30
    wrong = Scripted(torch.float32, exact() * 1e-18, exact, noise=noisy(1e10))
    judged(wrong, exact() * 1e-3, thorough=False, reference=rounding, known=known)
    assert wrong.asked  # now it is more than rounding ever was


def test_noise_as_large_as_the_tensor_settles_no_later_call() -> None:
    """Later data may be well conditioned, and then hide nothing."""
    first = judged(Scripted(torch.float32, exact(), exact, noise=noisy(4.0)), exact() * 1.5, thorough=False)
    assert first.findings == []
    well = Scripted(torch.float32, exact(), lambda: exact() * 1.5)
    assert [str(f.kind) for f in judged(well, exact() * 1.5, known=first.scales, thorough=False).findings] == ["logic"]
    well = Scripted(torch.float32, exact(), exact)
    assert judged(well, exact() * (1 + 1e-7), known=first.scales, thorough=False).findings == []


def test_power_of_a_later_call_is_that_of_the_scale() -> None:
    known = judged(Scripted(torch.bfloat16, exact(), exact), exact() * 1.004).scales
    later = judged(Scripted(torch.bfloat16, exact(), exact), exact() * 1.004, known=known)
    assert later.limits["output[0]"] == 4 * known["output[0]"].rms > 1e-3


def test_twin_is_asked_again_when_the_caller_wants_it() -> None:
    known = judged(Scripted(torch.bfloat16, exact(), exact), exact()).scales
    pair = TensorPair("output[0]", "output[0]", exact().to(torch.bfloat16), exact().to(torch.bfloat16))
    wrong: ControlRuns = Scripted(torch.bfloat16, exact(), lambda: exact() * 1.001)
    assert decide([pair], lambda: wrong, known, low_precision=True).findings == []
    [finding] = decide([pair], lambda: wrong, known, low_precision=True, recheck=True).findings
    assert finding.kind is Kind.LOGIC


# eager that does not repeat itself


@pytest.mark.parametrize("cause", ["mode", "junk", "itself"])
def test_eager_is_said_not_to_repeat_itself_only_if_it_does_not(cause: str) -> None:
    """Torch computes some things otherwise under a mode; and a program may read memory that nothing wrote."""
    runs = itertools.count(1)

    def under_a_mode() -> torch.Tensor:
        return (exact() * (1.1 if cause == "mode" else 1 + 0.1 * next(runs))).float()

    controls = Scripted(torch.float32, exact(), exact, again=under_a_mode, jumps=(1, 2), noise=noisy(1.0))
    if cause != "itself":
        controls.left_alone = lambda: exact().float()
    findings = judged(controls, exact() * 1.2, thorough=False).findings
    assert [finding.kind for finding in findings] == ([] if cause == "mode" else [Kind.NONDETERMINISTIC])
    for finding in findings:
        assert ("does not repeat itself from the same inputs" in finding.message) == (cause == "itself")
        assert ("memory that nothing wrote" in finding.message) == (cause == "junk")


@pytest.mark.parametrize("known", [False, True], ids=["first call", "later call"])
@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 1.0), (torch.bfloat16, 1.0), (torch.int64, 100.0)])
@pytest.mark.parametrize("jumps", [(), (1, 2)], ids=["rounding", "more"])
def test_float64_tells_rounding_from_what_does_not_repeat(
    dtype: torch.dtype, size: float, jumps: tuple[int, ...], known: bool
) -> None:
    def drifted() -> torch.Tensor:
        return (exact() * size * 1.1).to(dtype)

    controls = Scripted(
        dtype, exact() * size, lambda: exact() * size, again=drifted, alone=drifted, jumps=jumps, noise=noisy(1.0)
    )
    controls.jump = size
    if dtype is torch.int64:
        controls.noise = 0.3 / (torch.finfo(torch.float32).eps / 2)
    scale = NoiseBaseline(1e-9, 1e-9)
    decisions = judged(controls, drifted(), thorough=False, known={"output[0]": scale} if known else None)
    kinds = [str(finding.kind) for finding in decisions.findings]
    assert kinds == (["nondeterministic"] if jumps else [])
    if jumps:
        assert decisions.findings[0].evidence["the same in float64"] > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("drift", [0.0, 1e-3])
def test_noise_as_large_as_the_tensor_in_float64_too(dtype: torch.dtype, drift: float) -> None:
    """A program may cancel all of its digits; one that changes now and then cannot be judged."""
    controls = Scripted(dtype, exact(), lambda: exact() * 1.1, jumps=tuple(range(1, 11)), drift=drift, noise=2.0**24)
    decisions = judged(controls, exact() * 1.5, thorough=False)
    assert [str(finding.kind) for finding in decisions.findings] == (["nondeterministic"] if drift else [])
    assert decisions.limits.get("output[0]", 100) > 10


def test_without_float64_nobody_knows_whether_it_is_rounding() -> None:
    def drifted() -> torch.Tensor:
        return (exact() * 1.1).float()

    controls = Scripted(torch.float32, exact(), exact, again=drifted, noise=noisy(1.0), lost=("high_precision",))
    [finding] = judged(controls, drifted(), thorough=False).findings
    assert finding.kind is Kind.NONDETERMINISTIC
    assert finding.evidence["the same in float64"] == "could not be found out"


def test_operators_that_control_runs_leave_out_are_told() -> None:
    controls = Scripted(torch.float32, exact(), exact)
    controls.blind_spots = {Control.MONTE_CARLO: {"m::b", "m::a"}, Control.FLOAT64: ()}
    decisions = judged(controls, exact() * (1 + 1e-7))
    assert decisions.findings == []
    assert decisions.notes == ["Monte Carlo arithmetic cannot perturb what these return: m::a, m::b"]
    controls.blind_spots = {Control.FLOAT64: {"m::a"}}
    assert judged(controls, exact() * (1 + 1e-7)).notes == [
        "these have no kernel for float64, so the float64 reference is no more precise there: m::a"
    ]
