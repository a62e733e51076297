"""The C++ kernels of one generated module, compiled together."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from checked_backend._torch import cpp_kernels
from checked_backend._torch.caches import without_compile_caches
from checked_backend._torch.cpp_kernels import cpp_kernels_together
from tests.support.region_tools import agreed, checked, gathered

pytestmark = [pytest.mark.inductor]


def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Products between kernels, so that there are several, one of which gets a size."""
    y = torch.tanh(x @ w)
    z = torch.softmax(y @ w.t(), -1) + x.size(0)
    return torch.sigmoid(z @ w) * y.sum(1, keepdim=True)


@pytest.fixture
def sources(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the C++ compiler gets."""
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    found: list[str] = []
    load = CppPythonBindingsCodeCache.load_pybinding_async

    def noted(types: Any, source: str, **rest: Any) -> Any:
        found.append(source)
        return load(types, source, **rest)

    monkeypatch.setattr(CppPythonBindingsCodeCache, "load_pybinding_async", noted)
    return found


def values(*, dynamic: bool = False) -> list[torch.Tensor]:
    torch.manual_seed(0)
    x, w = (torch.randn(size, dtype=torch.float64).requires_grad_() for size in ((16, 32), (32, 24)))
    torch._dynamo.reset()
    with without_compile_caches():
        result = torch.compile(program, dynamic=dynamic)(x, w)
        result.sum().backward()
    assert x.grad is not None
    assert w.grad is not None
    return [result.detach(), x.grad, w.grad]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dynamic", [False, True])
def test_they_compute_the_same(
    sources: list[str], dynamic: bool, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch._inductor.async_compile.get_compile_threads", lambda: threads)
    expected = values(dynamic=dynamic)
    alone = len(sources)
    with cpp_kernels_together():
        found = values(dynamic=dynamic)
    assert len(sources) - alone == 2 < alone  # forward and backward
    assert all(map(torch.equal, found, expected))
    sources.clear()
    values(dynamic=dynamic)
    assert len(sources) == alone  # nothing stays


def refused(*_: object) -> str:
    return "this is no C++"


def with_macros(kernel: cpp_kernels._Kernel) -> bool:
    return not cpp_kernels._DIRECTIVE.search(f"{kernel.source}\n# define SIZE 8\n")


@pytest.mark.parametrize(
    ("what", "change"), [("_joined", refused), ("_Kernel.joins", property(with_macros))], ids=["refused", "macros"]
)
def test_what_cannot_be_compiled_together_is_compiled_alone(
    what: str, change: Any, sources: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = values()
    monkeypatch.setattr(f"checked_backend._torch.cpp_kernels.{what}", change)
    with cpp_kernels_together():
        assert all(map(torch.equal, values(), expected))
    assert not any("namespace kernel_1" in source for source in sources)


def test_other_threads_compile_as_ever(sources: list[str]) -> None:
    found: list[list[torch.Tensor]] = []
    with cpp_kernels_together():
        thread = threading.Thread(target=lambda: found.append(values()))
        thread.start()
        thread.join()
    assert found
    assert not any("namespace kernel_1" in source for source in sources)


def test_blocks_of_several_threads_end_in_any_order() -> None:
    from torch._inductor.async_compile import AsyncCompile

    before = AsyncCompile.cpp_pybinding, AsyncCompile.wait
    first, second, third = (cpp_kernels_together() for _ in range(3))
    for block in (first, second, third):
        block.__enter__()
    assert AsyncCompile.wait is not before[1]
    for block in (second, first, third):
        block.__exit__(None, None, None)
    assert (AsyncCompile.cpp_pybinding, AsyncCompile.wait) == before


def test_a_float64_twin_is_compiled_so_and_the_candidate_is_not(sources: list[str]) -> None:
    args = tuple(torch.randn(size, dtype=torch.bfloat16).requires_grad_() for size in ((16, 32), (32, 24)))

    def run(function: Callable[..., torch.Tensor]) -> None:
        function(*args).sum().backward()

    with without_compile_caches():
        assert agreed(gathered(lambda: run(checked(program, "inductor"))))
    joined = [source for source in sources if "namespace kernel_1" in source]
    assert len(joined) == 2
    assert all("double*" in source and "bfloat16*" not in source for source in joined)
