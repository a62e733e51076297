"""`check` on small programs that torch's CPU Inductor compiles wrongly, and on programs that only look as if it did."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

import checked_backend as cb
from tests.calibration.compilers import candidate
from tests.cases import Case
from tests.cases.collection import ALL

BY_NAME = {case.name: case for case in ALL}

ABOVE_INDUCTOR = {
    "gapped_windows_zero_the_rest": "aot_eager",
    "multilabel_margin": "aot_eager",
    "mutation_through_dropout_of_nothing": "aot_eager",
    "mutation_through_idle_dropout": "aot_eager",
    "overlapping_view_of_clone": "aot_eager",
    "overlapping_windows_do_not_compile": "aot_eager",
    "shift_of_bool": "aot_eager",
    "squeezed_in_place": "aot_eager",
    "addmm_with_alpha_zero": "decomposed",
    "addmm_with_beta_zero": "decomposed",
    "addr_strides": "decomposed",
    "cat_of_one_transposed": "decomposed",
    "mixed_linear_dtypes": "decomposed",
    "put_strides": "decomposed",
    "round_int8_to_decimals": "decomposed",
}
"""Bugs of Dynamo, AOT autograd and Inductor's decompositions, and the compiler that shows them without a C++ one."""

FIXED = (
    "multilabel_margin",
    "mutation_through_dropout_of_nothing",
    "mutation_through_idle_dropout",
    "squeezed_in_place",
)
"""Those that torch 2.15 compiles rightly."""

SAMPLE = ("acosh_overflows", "erf_of_tiny", "expm1_of_tiny", "expm1_of_tiny_bf16")
"""Bugs of Inductor's code generation."""


RIGHT = {"bug": {cb.Verdict.FAIL}, "noise": {cb.Verdict.PASS}, "nondeterministic": {*cb.Verdict} - {cb.Verdict.FAIL}}


def expect(case: Case, **how: Any) -> None:
    """Check it: a bug fails, noise passes, what eager does not repeat does not fail."""
    function, args, kwargs = case.program()
    report = cb.check(function, args, kwargs, gradients=case.train, **how)
    if report.verdict not in RIGHT[case.category]:
        raise AssertionError(f"{case.name} is {case.category}: {case.note}\n{report}")


def test_set_is_large_enough_and_half_of_it_is_clean() -> None:
    count = Counter(case.category for case in ALL)
    assert len(BY_NAME) == len(ALL) >= 80, "two cases of one name, or too few"
    assert count["noise"] + count["nondeterministic"] >= len(ALL) // 2
    assert count["bug"] >= 20


@pytest.mark.parametrize("case", ALL, ids=lambda case: case.name)
def test_programs_get_the_same_arguments_each_time(case: Case) -> None:
    state = torch.get_rng_state()
    (_, one, _), (_, other, _) = case.program(), case.program()
    assert len(one) == len(other)
    for left, right in zip(one, other, strict=True):
        assert left is not right
        torch.testing.assert_close(left, right, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", ABOVE_INDUCTOR)
def test_bugs_above_code_generation_fail(name: str) -> None:
    if name in FIXED and tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 15):
        pytest.skip("torch 2.15 compiles it rightly")
    case, compiler = BY_NAME[name], ABOVE_INDUCTOR[name]
    expect(case, compiler=compiler if compiler == "aot_eager" else candidate(compiler), dynamic=case.dynamic)


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    "case", [case for case in ALL if case.category == "nondeterministic"], ids=lambda case: case.name
)
def test_what_eager_does_not_repeat_does_not_fail(case: Case) -> None:
    expect(case, compiler="aot_eager")


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in ALL if case.category != "bug"], ids=lambda case: case.name)
def test_clean_programs_pass_with_other_roundings(case: Case) -> None:
    expect(case, compiler=candidate("everything"), dynamic=case.dynamic)


@pytest.mark.slow
@pytest.mark.inductor
@pytest.mark.ci_sample
@pytest.mark.parametrize("name", SAMPLE)
def test_bugs_of_code_generation_fail(name: str) -> None:
    """In a process of its own, which a miscompile may kill."""
    expect(BY_NAME[name], dynamic=BY_NAME[name].dynamic, isolate=True)
