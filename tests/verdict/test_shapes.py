"""Shapes that rounding changes."""

from __future__ import annotations

from types import SimpleNamespace

import torch

import checked_backend as cb
from checked_backend.verdict.decide import tolerate_flipped_shapes
from tests.support import faults
from tests.support.noise_tools import in_float32
from tests.support.raising import raising
from tests.support.region_tools import checked, found, gathered


def test_a_shape_that_rounding_changes_is_not_compared() -> None:
    def kept(x: torch.Tensor) -> torch.Tensor:
        return (torch.tanh(x) * 1.3 > 0.4).nonzero()

    x = torch.randn(60, 80, dtype=torch.bfloat16)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        report = gathered(lambda: checked(kept, in_float32)(x))
        assert report.verdict is cb.Verdict.INCONCLUSIVE
        assert "its shape depends on values that rounding changes" in " ".join(report.to_text(verbose=True).split())
        few = faults.spoiled_output(lambda places: places[1:])
        assert found(gathered(lambda: checked(kept, few)(torch.arange(9.0) - 3))) == {("structure.shape", "output[0]")}
    report = cb.check(lambda x: x[torch.tanh(x) * 1.3 > 0.4], (x.requires_grad_(),), compiler=in_float32)
    assert report.verdict is cb.Verdict.INCONCLUSIVE


def test_without_memory_for_control_runs_another_shape_is_not_compared() -> None:
    finding = cb.Finding(kind=cb.Kind.STRUCTURE, subject="output[0]", message="", detail="structure.shape")
    remaining, [skip] = tolerate_flipped_shapes([finding], lambda: SimpleNamespace(run=raising(MemoryError)))  # type: ignore[arg-type,return-value]
    assert remaining == []
    assert skip.matters
    assert "unsupported: memory" in skip.reason
