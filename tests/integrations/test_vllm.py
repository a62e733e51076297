"""vLLM's plugin, against a stand-in with the interface of vLLM's compilers: vLLM itself needs an accelerator.

The stand-in is as ``vllm.compilation.compiler_interface`` is in vLLM 0.33.0, whose own ``EagerAdaptor`` and
``InductorStandaloneAdaptor`` were seen checked by hand.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import entry_points
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import fx

import checked_backend as cb
from checked_backend.integrations.vllm import register


class CompilerInterface:
    """As in ``vllm.compilation.compiler_interface``."""

    name: str

    def compile(
        self,
        graph: fx.GraphModule,
        example_inputs: list[Any],
        compiler_config: Mapping[str, Any],
        compile_range: Any,
        key: str | None = None,
    ) -> tuple[Callable[..., Any] | None, Any]:
        return None, None

    def load(
        self, handle: Any, graph: fx.GraphModule, example_inputs: list[Any], graph_index: int, compile_range: Any
    ) -> Any:
        raise NotImplementedError


@pytest.fixture
def adaptor(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A compiler of vLLM's that may be wrong."""

    class Interface(CompilerInterface):
        pass

    class Adaptor(Interface):
        name = "stand-in"
        wrong = False

        def compile(self, graph: Any, example_inputs: Any, compiler_config: Any, *rest: Any, **more: Any) -> Any:
            return self.made(graph), ("handle", rest, more)

        def load(self, handle: Any, graph: Any, example_inputs: Any, graph_index: int, compile_range: Any) -> Any:
            return self.made(graph)

        def made(self, graph: fx.GraphModule) -> Callable[..., Any]:
            changed = fx.GraphModule(graph, graph.graph)
            return lambda *args: torch.utils._pytree.tree_map(self.spoiled, changed(*args))

        def spoiled(self, value: Any) -> Any:
            return value * 1.01 if self.wrong else value

    module = ModuleType("vllm.compilation.compiler_interface")
    module.CompilerInterface = Interface  # type: ignore[attr-defined]
    for name in ("vllm", "vllm.compilation"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "vllm.compilation.compiler_interface", module)
    monkeypatch.setenv("CHECKED_BACKEND", "1")
    monkeypatch.setenv("VLLM_DISABLE_COMPILE_CACHE", "0")
    monkeypatch.setenv("CHECKED_BACKEND_ON_DIVERGENCE", "record")
    register()
    register()
    return Adaptor()


def piece(x: torch.Tensor, *, in_tuple: bool = True) -> fx.GraphModule:
    graph = fx.Graph()
    result = graph.call_function(torch.nn.functional.silu, (graph.placeholder("x"),))
    graph.output((result,) if in_tuple else result)
    return fx.GraphModule(torch.nn.Module(), graph)


@pytest.mark.process
@pytest.mark.parametrize("in_tuple", [True, False])
@pytest.mark.parametrize("wrong", [True, False])
@pytest.mark.parametrize("verb", ["compile", "load"])
def test_pieces_are_checked(adaptor: Any, in_tuple: bool, wrong: bool, verb: str) -> None:
    adaptor.wrong = wrong
    x = torch.randn(8)
    graph = piece(x, in_tuple=in_tuple)
    if verb == "compile":
        compiled, handle = adaptor.compile(graph, [x], {"max_autotune": True}, (1, 8), key="k")
        assert handle == ("handle", ((1, 8),), {"key": "k"})
    else:
        compiled = adaptor.load("handle", graph, [x], 3, (1, 8))
    with cb.collect(closing=False) as session, torch.no_grad():
        returned = compiled(x)
    expected = torch.nn.functional.silu(x) * (1.01 if wrong else 1)
    torch.testing.assert_close(returned[0] if in_tuple else returned, expected)  # vLLM gets its own results
    (region,) = session.report.coverage.regions
    assert region.name.startswith("vLLM's piece ")
    assert session.report.verdict is (cb.Verdict.FAIL if wrong else cb.Verdict.PASS)


@pytest.mark.usefixtures("adaptor")
def test_nothing_comes_unchecked_out_of_a_cache() -> None:
    assert os.environ["VLLM_DISABLE_COMPILE_CACHE"] == "1"


def test_off_it_imports_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CHECKED_BACKEND", raising=False)
    monkeypatch.delenv("VLLM_DISABLE_COMPILE_CACHE", raising=False)
    register()
    assert "VLLM_DISABLE_COMPILE_CACHE" not in os.environ
    assert "vllm" not in sys.modules


def test_vllm_finds_it() -> None:
    found = [one for one in entry_points(group="vllm.general_plugins") if one.name == "checked_backend"]
    if not found:
        pytest.skip("the package was installed before it had this entry point")
    assert found[0].load() is register
