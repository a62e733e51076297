"""Rounding of fused kernels is a note, and only in half precision."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from checked_backend.options import CheckOptions, parse_options
from checked_backend.regions import compile as candidate
from checked_backend.regions.compile import compile_again
from tests.support.noise_tools import mlp
from tests.support.region_tools import checked, gathered


def inductor_that_rounds_other(error: float) -> Callable[..., Any]:
    """In Inductor's place: off by ``error`` in half precision, unless it is told to round wherever eager does.

    It is right where the tensors inside are handed out: nothing is fused there.
    """

    def inductor(
        gm: torch.fx.GraphModule, _example_inputs: Sequence[Any], *, config_patches: dict[str, Any]
    ) -> Callable[..., Any]:
        rounds_as_eager = config_patches.get("emulate_precision_casts", False)

        def run(*args: Any) -> Any:
            results = gm.forward(*args)
            if rounds_as_eager or results[0].dtype is torch.float64 or len(results) > 1:
                return results
            return tuple(result * (1 + error) for result in results)

        return run

    return inductor


@pytest.mark.parametrize(("dtype", "kinds"), [(torch.bfloat16, set()), (torch.float32, {"logic"})])
def test_fusion_rounding_is_a_note(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, kinds: set[str]) -> None:
    real = candidate.lookup_backend
    fake = inductor_that_rounds_other(1 / 8)
    monkeypatch.setattr(candidate, "lookup_backend", lambda name: fake if name == "inductor" else real(name))
    report = gathered(lambda: checked(mlp(dtype), "inductor")(torch.randn(6, 8, dtype=dtype)))
    assert {str(finding.kind) for finding in report.findings} == kinds
    assert any("fusion-rounding: output[0] differs" in note for note in report.coverage.notes) is not bool(kinds)
    assert ("fusion-rounding" in str(report)) is not bool(kinds)


@pytest.mark.slow
@pytest.mark.inductor
def test_compiler_without_fused_rounding_rounds_as_eager() -> None:
    def chain(x: torch.Tensor) -> tuple[torch.Tensor]:
        for _ in range(6):
            x = x * 1.3 + x / 7
        return (x,)

    x = torch.randn(4096, dtype=torch.bfloat16)
    graph = torch.fx.symbolic_trace(chain)
    options = parse_options(CheckOptions, "numcheck", {})
    plain, unfused = (candidate.inductor_with(options, None, emulate_precision_casts=on) for on in (False, True))
    assert not torch.equal(compile_again(plain, candidate.copy_graph(graph), [x], [x])(x)[0], chain(x)[0])
    assert torch.equal(compile_again(unfused, candidate.copy_graph(graph), [x], [x])(x)[0], chain(x)[0])
