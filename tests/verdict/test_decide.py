"""Decisions on scripted control runs: each step settles what it should, and findings say what they know."""

from __future__ import annotations

import itertools
import weakref

import pytest
import torch

from checked_backend.findings import Kind
from checked_backend.verdict import runner, thresholds
from checked_backend.verdict.decide import decide
from checked_backend.verdict.decisions import TensorPair
from checked_backend.verdict.envelope import NoiseBaseline
from checked_backend.verdict.runner import Build, Control, Recipe, Runner, Values
from tests.support.scripted_controls import Scripted, decided, exact, fused

# fused kernels that round less


def test_rounding_of_fused_kernels_is_a_note() -> None:
    controls = Scripted(torch.bfloat16, exact(), exact, unfused_value=lambda: exact().to(torch.bfloat16))
    decisions = decided(controls, fused())
    assert decisions.findings == []
    [note] = decisions.notes
    assert note.startswith("fusion-rounding: output[0] differs from eager by 0.125")
    assert controls.asked["unfused"] == 1


def test_what_remains_without_fused_rounding_is_a_finding() -> None:
    controls = Scripted(torch.bfloat16, exact(), exact, unfused_value=lambda: fused().to(torch.bfloat16))
    decisions = decided(controls, fused())
    assert [finding.detail for finding in decisions.findings] == ["logic.this_dtype"]
    assert decisions.notes == []


def test_wrong_logic_is_not_explained_by_fusion() -> None:
    controls = Scripted(torch.bfloat16, exact(), fused, unfused_value=lambda: exact().to(torch.bfloat16))
    assert [str(finding.kind) for finding in decided(controls, fused()).findings] == ["logic"]
    assert "unfused" not in controls.asked


def test_full_precision_and_compilers_without_the_mode_are_not_compiled_once_more() -> None:
    controls = Scripted(torch.float32, exact(), exact, unfused_value=lambda: exact().float())
    assert [str(finding.kind) for finding in decided(controls, exact() * 1.001).findings] == ["precision"]
    assert "unfused" not in controls.asked
    half = Scripted(torch.bfloat16, exact(), exact)
    assert [finding.detail for finding in decided(half, fused()).findings] == ["logic.this_dtype"]


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
    [finding] = decided(controls, exact() * factor).findings
    assert (finding.kind, finding.detail) == (Kind.LOGIC, f"logic.{detail}")
    assert "rounding" in finding.message or "compiled by itself" in finding.message


def test_what_the_candidate_gives_once_only_is_wrong_in_this_call() -> None:
    controls = Scripted(torch.float32, exact(), exact, alone=lambda: exact().float())
    [finding] = decided(controls, exact() * 1.001).findings
    assert (finding.kind, finding.detail) == (Kind.LOGIC, "logic.this_call")
    assert finding.evidence["difference_repeats"] == "in 0 of 2 more runs of the candidate"


# what noise hides


def mixed() -> torch.Tensor:
    """Numbers around 1000, and as many around 1e-3: a root mean square knows the first ones only."""
    return torch.cat([exact() * 1e3, exact() * 1e-3])


@pytest.mark.parametrize("wrong", [0.0, 1.01], ids=["zero", "one percent"])
@pytest.mark.parametrize("rest", [1.0, 1 + 1.2e-7], ids=["the rest is equal", "the rest is off by a rounding"])
def test_small_elements_are_not_lost_in_the_noise_of_large_ones(wrong: float, rest: float) -> None:
    candidate = torch.cat([exact() * 1e3 * rest, exact() * 1e-3 * wrong])
    [finding] = decided(Scripted(torch.float32, mixed(), lambda: candidate), candidate, thorough=False).findings
    assert finding.kind is Kind.LOGIC
    assert finding.metrics is not None
    clean = Scripted(torch.float32, mixed(), mixed)
    assert decided(clean, mixed() * rest, thorough=False).findings == []
    assert "float64" not in clean.asked  # rounding alone asks nothing of float64


def noisy(noise: float) -> float:
    """The same in roundoffs of float32."""
    return noise * 2**24


@pytest.mark.parametrize("noise", [0.01, 0.5, 4.0])
def test_float64_tells_what_large_noise_hides(noise: float) -> None:
    wrong = Scripted(torch.float32, exact(), lambda: exact() * 1.1, noise=noisy(noise))
    assert [str(f.kind) for f in decided(wrong, exact() * 1.1, thorough=False).findings] == ["logic"]
    right = Scripted(torch.float32, exact(), exact, noise=noisy(noise))
    decisions = decided(right, exact() * 1.1, thorough=False)
    assert (decisions.findings, decisions.skips) == ([], [])
    assert decisions.limits["output[0]"] < 1e-9 * 1.01
    assert "float64_noise" in wrong.asked
    assert "float64_noise" not in right.asked  # its twin needs no noise to be explained


@pytest.mark.parametrize("lost", ["twin", "float64"])
def test_what_noise_hides_wholly_is_not_compared_without_float64(lost: str) -> None:
    decisions = decided(Scripted(torch.float32, exact(), exact, noise=noisy(0.5), lost=(lost,)), exact() * 1.1)
    assert decisions.findings == []
    [skip] = [skip for skip in decisions.skips if skip.matters]
    assert skip.subject == "output[0]"
    assert "would hide an error of 100 %" in skip.reason
    assert ("float64 twin" if lost == "twin" else "high-precision reference") in skip.reason
    small = decided(Scripted(torch.float32, exact(), exact, noise=noisy(0.01), lost=(lost,)), exact() * 1.001)
    assert not any(skip.matters for skip in small.skips)
    assert 0.01 < small.limits["output[0]"] < 0.2


def test_zero_but_for_rounding_is_compared_by_its_size() -> None:
    """The gradient of a bias before a normalisation: nothing is left of it in float64, and no twin is compiled."""
    rounding = torch.linspace(-1, 1, 64) * 1e-8
    controls = Scripted(torch.float32, exact() * 1e-18, exact, again=lambda: rounding, noise=noisy(1e10))
    decisions = decided(controls, rounding.flip(0) * 2, thorough=False, reference=rounding)
    assert (decisions.findings, decisions.skips) == ([], [])
    assert "twin" not in controls.asked
    scale = decisions.scales["output[0]"]

    def again(reference: torch.Tensor, candidate: torch.Tensor) -> int:
        asked = Scripted(torch.float32, exact() * 1e-18, exact, noise=noisy(1e10))
        decided(asked, candidate, thorough=False, reference=reference, known={"output[0]": scale})
        return len(asked.asked)

    assert again(rounding * 2, rounding.flip(0) * 2) == 0  # rounding of the size that was seen
    assert again(rounding * 1e6, rounding.flip(0) * 1e6) > 0  # now it is something


def test_rounding_that_changes_its_size_is_rechecked_ever_more_seldom() -> None:
    """The gradient of a bias before a normalisation: nothing but rounding, small in one call and large in the next."""
    known: dict[str, NoiseBaseline] = {}
    heard = []
    for call in range(60):
        size = 10.0 ** ((call * 0.618) % 1 * 3)
        rounding = torch.randn(64, generator=torch.Generator().manual_seed(call)) * 1e-8 * size
        controls = Scripted(torch.float32, exact() * 1e-18 * size, lambda: exact() * 1e-18, noise=noisy(1e10))
        decisions = decided(controls, rounding.flip(0), thorough=False, reference=rounding, known=known)
        assert decisions.findings == []
        for name, scale in decisions.scales.items():
            known[name] = scale.widened(known.get(name))
        heard += [call] if controls.asked else []
    assert len(heard) <= 6
    assert max(heard) < 30
    wrong = Scripted(torch.float32, exact() * 1e-18, exact, noise=noisy(1e10))
    decided(wrong, exact() * 1e-3, thorough=False, reference=rounding, known=known)
    assert wrong.asked  # now it is more than rounding ever was


def test_noise_as_large_as_the_tensor_settles_no_later_call() -> None:
    """Later data may be well conditioned, and then hide nothing."""
    first = decided(Scripted(torch.float32, exact(), exact, noise=noisy(4.0)), exact() * 1.5, thorough=False)
    assert first.findings == []
    well = Scripted(torch.float32, exact(), lambda: exact() * 1.5)
    assert [str(f.kind) for f in decided(well, exact() * 1.5, known=first.scales, thorough=False).findings] == ["logic"]
    well = Scripted(torch.float32, exact(), exact)
    assert decided(well, exact() * (1 + 1e-7), known=first.scales, thorough=False).findings == []


@pytest.mark.parametrize(("recheck", "kinds"), [(False, []), (True, ["logic"])])
def test_a_recheck_measures_anew_what_had_far_more_noise_than_rounding(recheck: bool, kinds: list[str]) -> None:
    """One batch, as ill-conditioned as no later one, must not hide what is wrong from then on."""
    known = decided(Scripted(torch.float32, exact(), exact, noise=noisy(0.1)), exact() * 1.1, thorough=False).scales
    pair = TensorPair("output[0]", "output[0]", exact().float(), (exact() * 1.02).float())
    later: Runner = Scripted(torch.float32, exact(), lambda: exact() * 1.02)
    assert [str(one.kind) for one in decide([pair], lambda: later, known, recheck=recheck).findings] == kinds


def test_power_of_a_later_call_is_that_of_the_scale() -> None:
    known = decided(Scripted(torch.bfloat16, exact(), exact), exact() * 1.004).scales
    later = decided(Scripted(torch.bfloat16, exact(), exact), exact() * 1.004, known=known)
    assert later.limits["output[0]"] == 4 * known["output[0]"].rms > 1e-3


def test_twin_is_asked_again_where_nothing_is_known() -> None:
    known = decided(Scripted(torch.bfloat16, exact(), exact), exact()).scales
    pair = TensorPair("output[0]", "output[0]", exact().to(torch.bfloat16), exact().to(torch.bfloat16))
    wrong: Runner = Scripted(torch.bfloat16, exact(), lambda: exact() * 1.001)
    assert decide([pair], lambda: wrong, known, low_precision=True).findings == []
    assert decide([pair], lambda: wrong, known, low_precision=True, recheck=True).findings == []
    [finding] = decide([pair], lambda: wrong, {}, low_precision=True, recheck=True).findings
    assert finding.kind is Kind.LOGIC


@pytest.mark.parametrize(
    ("times", "recheck", "operators_checked", "runs", "twin"),
    [
        (0.9, True, True, 0, False),
        (1.5, False, True, 0, False),
        (1.5, True, True, 1, False),  # another draw of the same noise
        (1.5, True, False, thresholds.FIRST_RUNS, True),
        (4.2, False, True, 1, False),
        (4.2, True, True, thresholds.FIRST_RUNS, True),
    ],
)
def test_a_recheck_settles_what_is_within_the_noise_as_it_is(
    times: float, recheck: bool, operators_checked: bool, runs: int, twin: bool
) -> None:
    known = decided(Scripted(torch.float32, exact(), exact, noise=noisy(1e-4)), exact() * (1 + 1e-5)).scales
    candidate = exact() * (1 + times * known["output[0]"].rms)
    controls = Scripted(torch.float32, exact(), exact, noise=noisy(1e-4))
    pair = TensorPair("output[0]", "output[0]", exact().float(), candidate.float())
    decide([pair], lambda: controls, known, low_precision=True, recheck=recheck, operators_checked=operators_checked)
    assert (controls.asked.get("monte_carlo", 0), "twin" in controls.asked) == (runs, twin)
    thorough = Scripted(torch.float32, exact(), exact, noise=noisy(1e-4))
    decide([pair], lambda: thorough, known, thorough=True, low_precision=True, recheck=recheck, operators_checked=True)
    assert ("twin" in thorough.asked) == (recheck and times > 1)


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
    findings = decided(controls, exact() * 1.2, thorough=False).findings
    assert [finding.kind for finding in findings] == ([] if cause == "mode" else [Kind.NONDETERMINISTIC])
    for finding in findings:
        assert ("does not repeat itself from the same inputs" in finding.message) == (cause == "itself")
        assert ("memory that nothing wrote" in finding.message) == (cause == "junk")


def test_a_kernel_that_reads_junk_in_this_dtype_alone_is_nondeterministic() -> None:
    """Float64 has another kernel, which repeats itself. The candidate met other junk in the checked call only."""
    runs = itertools.count(50)

    def again() -> torch.Tensor:
        return (exact() * next(runs)).bfloat16()

    met = exact() * torch.where(torch.arange(exact().numel()) < 3, torch.nan, 1.0)
    controls = Scripted(torch.bfloat16, exact(), exact, again=again, alone=lambda: exact().bfloat16())
    controls.left_alone = lambda: exact().bfloat16()
    [finding] = decided(controls, met).findings
    assert finding.kind is Kind.NONDETERMINISTIC
    [finding] = decided(Scripted(torch.bfloat16, exact(), exact, alone=lambda: exact().bfloat16()), met).findings
    assert finding.kind.fails


def test_wrong_logic_is_wrong_whatever_eager_reads() -> None:
    """The float64 twin shows it, and there eager repeats itself."""
    controls = Scripted(torch.bfloat16, exact(), lambda: exact() * 1.5, again=lambda: (exact() * 50.0).bfloat16())
    controls.left_alone = lambda: exact().bfloat16()
    [finding] = decided(controls, exact() * 1.5).findings
    assert finding.kind is Kind.LOGIC


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
    decisions = decided(controls, drifted(), thorough=False, known={"output[0]": scale} if known else None)
    assert [str(finding.kind) for finding in decisions.findings] == (["nondeterministic"] if jumps else [])
    if jumps:
        assert decisions.findings[0].evidence["noise_in_float64"] > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("drift", [0.0, 1e-3])
def test_noise_as_large_as_the_tensor_in_float64_too(dtype: torch.dtype, drift: float) -> None:
    """A program may cancel all of its digits; one that changes now and then cannot be decided."""
    controls = Scripted(dtype, exact(), lambda: exact() * 1.1, jumps=tuple(range(1, 11)), drift=drift, noise=2.0**24)
    decisions = decided(controls, exact() * 1.5, thorough=False)
    assert [str(finding.kind) for finding in decisions.findings] == (["nondeterministic"] if drift else [])
    assert decisions.limits.get("output[0]", 100) > 10


def test_without_float64_nobody_knows_whether_it_is_rounding() -> None:
    def drifted() -> torch.Tensor:
        return (exact() * 1.1).float()

    controls = Scripted(torch.float32, exact(), exact, again=drifted, noise=noisy(1.0), lost=("float64",))
    [finding] = decided(controls, drifted(), thorough=False).findings
    assert finding.kind is Kind.NONDETERMINISTIC
    assert finding.evidence["noise_in_float64"] == "could not be found out"


def test_operators_that_control_runs_leave_out_are_told() -> None:
    controls = Scripted(torch.float32, exact(), exact)
    controls.blind_spots = {Control.MONTE_CARLO: {"m::b", "m::a"}, Control.FLOAT64: set()}
    decisions = decided(controls, exact() * (1 + 1e-7))
    assert decisions.findings == []
    assert decisions.notes == ["Monte Carlo arithmetic cannot perturb what these return: m::a, m::b"]
    controls.blind_spots = {Control.FLOAT64: {"m::a"}}
    told = "these have no kernel for float64, so the float64 reference is no more precise there: m::a"
    assert decided(controls, exact() * (1 + 1e-7)).notes == [told]


@pytest.mark.parametrize(("room", "times"), [(runner.REMEMBERED_BYTES, 1), (0, 2)])
def test_a_run_that_is_asked_for_again_is_not_made_again(
    room: int, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Signs of zeros are held against the runs that the noise comes from, unless these take too much memory."""
    monkeypatch.setattr(runner, "REMEMBERED_BYTES", room)
    right = torch.cat([torch.zeros(1), exact()])
    controls = Scripted(torch.float32, right, lambda: right)
    candidate = torch.where(right == 0, -0.0, right * (1 + 1e-7)).float()
    decide([TensorPair("output[0]", "output[0]", right.float(), candidate)], lambda: controls, {}, signs=True)
    assert controls.asked["monte_carlo"] == times * thresholds.FIRST_RUNS
    assert controls.asked["repeat"] == times


def test_no_more_than_one_run_of_eager_is_held_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "REMEMBERED_BYTES", 0)
    made: list[weakref.ref[torch.Tensor]] = []

    class Watched(Scripted):
        def run(self, recipe: Recipe) -> Values | None:
            held.append(sum(value() is not None for value in made))
            values = super().run(recipe)
            made.extend(map(weakref.ref, () if values is None or recipe.build is not Build.EAGER else values.values()))
            return values

    held: list[int] = []
    assert decided(Watched(torch.float32, exact(), exact), exact() * (1 + 1e-7), thorough=False).findings == []
    assert len(held) > thresholds.FIRST_RUNS
    assert max(held) == 0
