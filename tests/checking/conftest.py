from __future__ import annotations

from contextlib import nullcontext

import pytest
from torch._inductor.runtime.benchmarking import benchmarker


@pytest.fixture
def quick_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels say how long they take, and no caches are emptied, which takes seconds."""
    monkeypatch.setattr(benchmarker, "benchmark_cpu", lambda milliseconds, **_more: milliseconds)
    monkeypatch.setattr("checked_backend.checking.kernel_choices.fresh_compile_caches", nullcontext)
