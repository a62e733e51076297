"""Rounding of a GPU is no bug: TF32, reduced precision, atomics. TF32 that nobody asked for is one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import checked_backend as cb
from tests.support import faults


@pytest.mark.parametrize("allowed", [False, True])
def test_products_in_tf32_are_no_bug_where_they_are_allowed(
    gpu: str, allowed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", allowed)
    x, y = torch.randn(96, 512, device=gpu), torch.randn(512, 64, device=gpu, requires_grad=True)
    assert cb.check(lambda x, y: (x @ y).relu(), (x, y)).verdict is cb.Verdict.PASS


def test_tf32_that_eager_does_not_use_is_found(gpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def compiler(gm: torch.fx.GraphModule, _example_inputs: Sequence[Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            with monkeypatch.context() as patch:
                patch.setattr(torch.backends.cuda.matmul, "allow_tf32", True)
                return gm.forward(*args)

        return run

    x, y = torch.randn(96, 512, device=gpu), torch.randn(512, 64, device=gpu)
    report = cb.check(torch.mm, (x, y), compiler=compiler)
    assert [finding.kind for finding in report.findings] == [cb.Kind.PRECISION], str(report)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_reductions_in_reduced_precision_are_no_bug(device: str, dtype: torch.dtype) -> None:
    x, y = torch.randn(48, 2048, device=device, dtype=dtype), torch.randn(2048, 32, device=device, dtype=dtype)
    assert cb.check(torch.mm, (x, y)).verdict is cb.Verdict.PASS


def test_sums_by_atomics_do_not_fail(device: str) -> None:
    x, index = torch.randn(20_000, device=device), torch.randint(8, (20_000,), device=device)
    report = cb.check(lambda x, index: torch.zeros(8, device=x.device).index_add(0, index, x.sin()), (x, index))
    assert report.verdict is not cb.Verdict.FAIL, str(report)


def test_gradients_by_atomics_do_not_fail(device: str) -> None:
    embedding = torch.nn.Embedding(16, 32).to(device)
    report = cb.check(embedding, (torch.randint(16, (64, 256), device=device),))
    assert report.verdict is not cb.Verdict.FAIL, str(report)


def test_a_wrong_sum_fails_beside_atomics(device: str) -> None:
    x, index = torch.randn(20_000, device=device), torch.randint(8, (20_000,), device=device)
    compiler = faults.every_output(lambda result: result * 1.01)
    report = cb.check(
        lambda x, index: torch.zeros(8, device=x.device).index_add(0, index, x), (x, index), compiler=compiler
    )
    assert report.verdict is cb.Verdict.FAIL, str(report)
