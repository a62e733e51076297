"""Kernels that are checked part by part, because there is no room for all tensors of a region at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor.lowering import lowerings

import checked_backend as cb
from checked_backend._torch.caches import without_compile_caches
from checked_backend.regions.operator_check import check
from checked_backend.regions.operator_check.in_place import KernelCheck
from tests.support.planted import Fault, in_half_precision, planted

pytestmark = [pytest.mark.inductor]


class Layers(nn.Module):
    """Draws random numbers, writes to its buffers, and repeats itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 32, 32) / 6)
        self.norm = nn.BatchNorm1d(32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weight:
            x = torch.tanh(nn.functional.dropout(x, 0.1) @ weight)
        return self.norm(x)


def report(room: float, monkeypatch: pytest.MonkeyPatch) -> tuple[cb.Report, list[int]]:
    """Check it in as much room, in bytes. Returns also what each run kept."""
    recorded, kept = KernelCheck._recorded, list[int]()

    def noting(kernels: KernelCheck, *args: Any, **kwargs: Any) -> Any:
        called = recorded(kernels, *args, **kwargs)
        kept.append(max(recording.kept for _, recording in called))
        return called

    torch._dynamo.reset()
    with monkeypatch.context() as patched, without_compile_caches():
        patched.setattr(KernelCheck, "_recorded", noting)
        patched.setattr(check, "LARGEST", room)
        module, x = Layers().bfloat16(), torch.randn(64, 32, dtype=torch.bfloat16)
        return cb.check(module, (x,), compiler="inductor", localize=False), kept


def test_kernels_are_checked_in_as_many_runs_as_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, once = report(1 << 30, monkeypatch)
    size = max(once)
    parts, kept = report(size / 2, monkeypatch)
    for one in (whole, parts):
        assert one.verdict is cb.Verdict.PASS, one.to_text()
        assert not [skip for skip in one.coverage.skipped if "operators" in skip.subject]
    assert len(kept) > len(once)
    assert max(kept) <= size / 2
    assert parts.coverage.checked["operators"] > 0.7 * whole.coverage.checked["operators"]  # without what is a view
    with planted(Fault("tanh", "pointwise", "lowering", in_half_precision)):
        found, _ = report(size / 2, monkeypatch)
    assert found.findings[0].op == "torch.tanh"


def test_what_there_is_no_room_for_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    told, kept = report(4096, monkeypatch)
    assert max(kept) <= 4096
    reasons = [skip.reason for skip in told.coverage.skipped if skip.subject == "operators by themselves"]
    assert any("the tensors inside of the region take more than 3.8e-06 GiB" in reason for reason in reasons), reasons


def written_twice(x: torch.Tensor, i: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Its result has a buffer of whose two values only the last is seen, and nothing reads it."""
    for _ in range(5):
        x = torch.sin((x @ w) * 8)
    y = torch.zeros_like(x).scatter_add(0, i, x)
    return y.index_put_((i[:, 0],), (y @ w).cos(), accumulate=True)


def larger(right: Any, self: Any, index: Any, source: Any, *rest: Any) -> Any:
    scaled = lowerings[torch.ops.aten.mul.Tensor](source, 1.05) if source.get_dtype() is torch.bfloat16 else source
    return right(self, index, scaled, *rest)


def test_a_result_whose_buffer_tells_nothing_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = (torch.randn(32, 32, dtype=torch.bfloat16) for _ in range(2))
    monkeypatch.setattr(check, "LARGEST", 18432)
    with without_compile_caches(), planted(Fault("index_put", "scatter", "lowering", larger)):
        report = cb.check(written_twice, (x, torch.randint(32, (32, 32)), w / 6), localize=False)
    assert [finding.op for finding in report.findings] == ["index_put_"]
