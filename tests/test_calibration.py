"""A sample of the calibration program: clean programs pass, planted bugs are found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import checked_backend as cb
from checked_backend.verdict import thresholds
from tests.calibration import __main__ as program
from tests.calibration.compilers import candidate, planted, trace
from tests.calibration.constants import changed
from tests.calibration.families import FAMILIES
from tests.calibration.family import bugs_of
from tests.calibration.rounding import VARIANTS
from tests.calibration.run import DTYPES, Case, Outcome, run_case
from tests.calibration.table import detectable, render

CLEAN = [
    ("encoder_block", "training", "everything"),
    ("conv_bn_train", "training", "reordered"),
    ("lstm", "inference", "library"),
    ("contrastive", "training", "contracted"),
    ("tiny_gradients", "training", "decomposed"),
    ("ties", "inference", "fused"),
    ("standardise", "training", "everything"),
]
BUGS = [
    ("layernorm_residual", "inference", "eps: 1e-6 for 1e-5"),
    ("mlp", "training", "gelu variant: tanh for erf"),
    ("causal_attention", "inference", "mask: off by one"),
    ("swiglu", "training", "swapped operand: gate for value"),
    ("conv_groupnorm", "inference", "dropped bias: of the convolution"),
    ("logsumexp", "inference", "wrong reduction dimension: over the batch"),
    ("bilinear", "inference", "one element: the middle one is 1 % too large"),
    ("conv_bn_train", "inference", "stale statistic: running ones not updated"),
    ("scan", "inference", "off by one: exclusive for inclusive"),
    ("tiny_gradients", "training", "scale: 1.01e-6 for 1e-6"),
    ("embedding_positional", "training", "mask: padding gets a gradient"),
]
CLASSES = {
    "eps",
    "scale",
    "mask",
    "off by one",
    "gelu variant",
    "swapped operand",
    "dropped bias",
    "wrong reduction dimension",
    "one element",
    "stale statistic",
    "missing upcast",
}


def in_turn(cases: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """The cases, in float32 and bfloat16 by turns."""
    return [(*case, ("float32", "bfloat16")[number % 2]) for number, case in enumerate(cases)]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("family", "mode", "variant", "dtype"), in_turn(CLEAN), ids=lambda word: word)
def test_clean_program_with_other_roundings_passes(family: str, mode: str, variant: str, dtype: str) -> None:
    outcome = run_case(Case(family, dtype, mode, variant))
    assert (outcome.verdict, outcome.findings) == ("pass", [])


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("family", "mode", "bug", "dtype"), in_turn(BUGS), ids=lambda word: word.split(":")[0])
def test_planted_bug_is_found(family: str, mode: str, bug: str, dtype: str) -> None:
    outcome = run_case(Case(family, dtype, mode, "eager", bug))
    assert detectable(outcome)
    assert outcome.verdict == "fail"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("bug", ["", "scale: 0.26 for 0.25", "one element: the middle one is 1 % too large"])
def test_numcheck_without_a_twin_for_every_difference(bug: str) -> None:
    bug = bug if bug in ("", *bugs_of(FAMILIES["gru"], torch.float32)) else "scale: 1.002 for 1"
    outcome = run_case(Case("gru", "float32", "training", "eager" if bug else "everything", bug, face="numcheck"))
    assert outcome.verdict == ("fail" if bug else "pass")


def test_bug_in_half_precision_below_its_noise_is_found_by_the_twin() -> None:
    outcome = run_case(Case("layernorm_residual", "bfloat16", "inference", "eager", "eps: 1e-6 for 1e-5"))
    assert outcome.noise_ratio < 1
    assert 1e-6 < outcome.twin_relative < 1e-4
    assert outcome.findings == ["logic output[0]"]


@pytest.mark.parametrize("face", ["check", "numcheck"])
def test_bug_that_rounding_hides_bit_for_bit_is_found_by_the_twin(face: str) -> None:
    outcome = run_case(Case("mlp", "bfloat16", "inference", "eager", "scale: 1.001 for 1", face=face))
    assert outcome.visible == 0
    assert detectable(outcome)
    assert outcome.findings == ["logic output[0]"]


@pytest.mark.parametrize("face", ["check", "numcheck"])
def test_program_equal_bit_for_bit_passes_with_its_twin(face: str) -> None:
    outcome = run_case(Case("mlp", "bfloat16", "inference", "eager", face=face))
    assert (outcome.verdict, outcome.skips) == ("pass", [])


@pytest.mark.more
def test_right_program_in_the_place_of_itself_passes() -> None:
    family = FAMILIES["gpt_block"]
    tensors = family.make(torch.float32, training=True)
    compiler = planted(trace(family.program(torch.float32), tensors), candidate("everything"))
    report = cb.check(family.program(torch.float32), tensors, compiler=compiler)
    assert report.verdict is cb.Verdict.PASS
    assert report.coverage.checked["gradients"] == 9


@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_every_variant_rounds_otherwise_than_eager(variant: str) -> None:
    family = FAMILIES["layernorm_by_hand" if variant in ("contracted", "decomposed") else "encoder_block"]
    dtype = torch.bfloat16 if variant == "fused" else torch.float32
    tensors = family.make(dtype, training=False)
    program = family.program(dtype)
    with torch.no_grad():
        expected, actual = program(*tensors), torch.compile(program, backend=candidate(variant))(*tensors)
    if variant == "decomposed":  # Inductor's decompositions of this program are its own operators
        assert torch.equal(expected, actual)
    else:
        assert not torch.equal(expected, actual)
        error = (expected - actual).float().norm() / expected.float().norm()
        assert error < 4 * torch.finfo(dtype).eps


def test_every_class_of_bug_in_at_least_20_families() -> None:
    assert len(FAMILIES) >= 20
    bugs = [bug for family in FAMILIES.values() if family.low for bug in bugs_of(family, torch.bfloat16)]
    assert {bug.split(":")[0] for bug in bugs} >= CLASSES
    assert len(bugs) >= 100


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_every_bug_changes_its_program(name: str) -> None:
    """In float64, so that nothing is rounded away; but for those that a mode, a dtype or other data shows."""
    family = FAMILIES[name]
    tensors = family.make(torch.float64, training=False)

    def results(bug: str | None) -> list[torch.Tensor]:
        given = [tensor.clone() for tensor in tensors]
        returned = family.program(torch.float64, bug)(*given)
        return [*(returned if isinstance(returned, tuple) else (returned,)), *given]

    with torch.no_grad():
        right = results(None)
        same = {
            bug
            for bug in bugs_of(family, torch.float64)
            if all(
                one.shape == other.shape and torch.equal(one.nan_to_num(), other.nan_to_num())
                for one, other in zip(right, results(bug), strict=True)
            )
        }
    assert all(bug.startswith("missing upcast") or "gradient" in bug or bug == "eps: 1e-6 for 1e-8" for bug in same)


def _outcome(verdict: str, bug: str = "", effect: float = 0.0) -> Outcome:
    return Outcome(Case("mlp", "float32", "inference", "eager", bug), verdict, [], [], effect, effect)


@pytest.mark.parametrize(
    ("outcome", "good", "line"),
    [
        (_outcome("pass"), True, "FALSE ALARMS: 0"),
        (_outcome("fail"), False, "FALSE ALARMS: 1"),
        (_outcome("inconclusive"), False, "FALSE ALARMS: 1"),
        (_outcome("fail", "a bug", 100), True, "MISSED, above the noise: 0"),
        (_outcome("pass", "a bug", 100), False, "MISSED, above the noise: 1"),
        (_outcome("inconclusive", "a bug", 100), False, "MISSED, above the noise: 1"),
        (_outcome("pass", "a bug", 0.5), True, "not seen, below the noise: 1"),
    ],
    ids=["passed", "alarm", "unsure", "caught", "missed", "missed-unsure", "below"],
)
def test_table_says_what_was_called_wrongly(outcome: Outcome, good: bool, line: str) -> None:
    text, is_good = render([outcome])
    assert is_good is good
    assert line in text


def test_program_goes_on_where_it_was_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results = tmp_path / "results.jsonl"
    wanted = ["--families", "focal_loss", "--dtype", "float32", "--mode", "inference", "--resume", str(results)]
    assert program.main([*wanted, "--only", "clean", "--every", "4"]) == 0
    kept = [json.loads(line) for line in results.read_text().splitlines()]
    assert [each["case"]["compiler"] for each in kept] == ["decomposed", "library"]

    ran: list[Case] = []

    def count(case: Case) -> Outcome:
        ran.append(case)
        return Outcome(case, "fail" if case.bug else "pass", [], [])

    monkeypatch.setattr(program, "run_case", count)
    assert program.main(wanted) == 0
    assert {case.compiler for case in ran if not case.bug} == {*VARIANTS} - {"decomposed", "library"}
    assert len(ran) == len(VARIANTS) - 2 + len(bugs_of(FAMILIES["focal_loss"], DTYPES["float32"]))
    assert program.main([*wanted, "--time-limit", "0"]) == 0
    assert len(results.read_text().splitlines()) == len(ran) + 2
    assert "10 clean cases" not in capsys.readouterr().out


def test_a_constant_can_be_changed_for_a_run() -> None:
    with changed(["ENVELOPE_FACTOR=2", "FIRST_RUNS=1"]):
        assert (thresholds.ENVELOPE_FACTOR, thresholds.FIRST_RUNS) == (2.0, 1)
    assert thresholds.ENVELOPE_FACTOR == 8.0
    with pytest.raises(ValueError, match="'NOTHING' is no number"), changed(["NOTHING=1"]):
        pass
