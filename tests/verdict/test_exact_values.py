"""Exact values have no noise that could hide a bug."""

from __future__ import annotations

import pytest
import torch

import checked_backend as cb
from tests.support import faults
from tests.support.region_tools import agreed, checked, found, gathered

EXACT_TIES = {
    "greatest of equals": (lambda x: (x * 0.5).argmax(-1), lambda places: torch.zeros_like(places)),
    "comparison of equals": (lambda x: x * 0.5 >= 1.0, lambda _: None),
    "floor of halves": (lambda x: (x / 2).floor(), lambda floors: floors - (floors % 2 == 0) * 1.0),
}


@pytest.mark.parametrize("name", EXACT_TIES)
def test_exact_values_have_no_noise_that_hides_a_bug(name: str) -> None:
    program, wrong = EXACT_TIES[name]
    x = torch.randint(0, 9, (200, 20)).float()

    def spoil(result: torch.Tensor) -> torch.Tensor:
        spoiled = wrong(result)
        return x * 0.5 > 1.0 if spoiled is None else spoiled

    assert found(gathered(lambda: checked(program, faults.spoiled_output(spoil))(x)))
    assert agreed(gathered(lambda: checked(program, faults.clean())(x)))


def test_what_a_cast_and_back_takes_from_a_value_is_not_nothing() -> None:
    """In float64 it is zero, and nothing is near to that. A program that feeds the error back asks for just that."""

    def rest(x: torch.Tensor) -> torch.Tensor:
        return x - x.bfloat16().float()

    x = torch.randn(200)
    assert agreed(gathered(lambda: checked(rest, "aot_eager")(x)))

    def zero(results: list[torch.Tensor], _args: object) -> list[torch.Tensor]:
        """As a fused kernel that leaves the cast out: what is handed out on the way is rounded."""
        return [torch.zeros_like(results[0])] if len(results) == 1 else results

    nothing = faults.run_in_python(lambda _gm: zero)
    report = gathered(lambda: checked(rest, nothing)(x))
    assert report.verdict is cb.Verdict.INCONCLUSIVE
    [skip] = [skip for skip in report.coverage.skipped if skip.matters]
    assert skip.subject == "output[0]"
    assert skip.reason == "it is what rounding leaves, and of that the compiled program has nothing"

    def rounded_on_the_way(x: torch.Tensor) -> torch.Tensor:
        return (x * 3 - x - x - x).sum(-1)

    # a program in half precision throughout asks for no rest, and a fused kernel that leaves none is right
    x = torch.randn(200, 3, dtype=torch.bfloat16)
    assert rounded_on_the_way(x).count_nonzero() > 64
    assert agreed(gathered(lambda: checked(rounded_on_the_way, nothing)(x)))


@pytest.mark.inductor
def test_a_cast_and_back_that_inductor_leaves_out_is_told() -> None:
    report = cb.check(lambda x: x - x.bfloat16().float(), (torch.randn(200),))
    assert not report.findings
    if report.verdict is cb.Verdict.INCONCLUSIVE:  # before torch 2.13 there was no setting that kept the casts
        assert "it is what rounding leaves" in " ".join(report.to_text(verbose=True).split())
    else:
        [note] = [note for note in report.coverage.notes if "fusion-rounding" in note]
        assert "fusion-rounding: output[0]" in note
        assert "emulate_precision_casts" in note
