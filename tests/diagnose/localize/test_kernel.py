"""The generated code of one operator, cut out of what Inductor generates."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._inductor.output_code import CompiledFxGraph

from checked_backend._torch.caches import without_compile_caches
from checked_backend._torch.generated_modules import GeneratedModule, generated_modules_noted
from checked_backend.diagnose.kernel import kernel_in
from checked_backend.errors import CheckedBackendError
from checked_backend.findings import Coverage, Finding, Kernel, Kind
from checked_backend.report import Report

TEXT = """
cpp_fused_add_relu_0 = async_compile.cpp_pybinding(['const float*', 'float*'], r'''
#include <torch/csrc/inductor/cpp_prefix.h>
extern "C"  void  kernel(const float* in_ptr0)
{
    auto tmp1 = tmp0 * (tmp0>0);
}
''')


# kernel path: /home/somebody/cache/ab.py
triton_poi_fused_relu_1 = async_compile.triton('triton_poi_fused_relu_1', '''
import triton
def triton_poi_fused_relu_1(in_ptr0, xnumel, XBLOCK : tl.constexpr):
    pass
''', device_str='cuda')

def call(args):
        buf0 = empty_strided_cpu((4, 4), (4, 1), torch.float32)
        # Topologically Sorted Source Nodes: [linear], Original ATen: [aten.mm]
        extern_kernels.mm(reinterpret_tensor(a, (4, 4), (1, 4), 0),
            b, out=buf0)
        del a
        cpp_fused_add_relu_0(buf0, buf1)
        triton_poi_fused_relu_1.run(buf1, buf2, 4)
"""
MADE = {"buf0": ["mm"], "buf1": ["add", "relu"], "buf2": ["relu", "neg"]}


def module(kind: Any = "forward", text: str = TEXT, made: Mapping[str, Sequence[str]] = MADE) -> GeneratedModule:
    graph = fx.Graph()
    for name in ("mm", "add", "relu"):
        graph.placeholder(name).meta["source_fn_stack"] = [({"mm": "linear", "add": "y", "relu": "z"}[name], None)]
    graph.output(())
    functions: Any = [(None, one) for one in ast.walk(ast.parse(text)) if isinstance(one, ast.FunctionDef)]
    return GeneratedModule(kind, fx.GraphModule({}, graph), {}, functions, (), text, made)


def dynamo() -> fx.GraphModule:
    graph = fx.Graph()
    for name in ("linear", "y", "z"):
        graph.placeholder(name)
    graph.output(())
    return fx.GraphModule({}, graph)


def test_a_kernel_is_given_with_its_source_and_what_else_it_computes() -> None:
    found = kernel_in([module()], "forward", "relu", dynamo())
    assert (found.name, found.language, found.computes) == ("cpp_fused_add_relu_0", "C++", ("add", "relu"))
    assert found.code.splitlines()[0] == "#include <torch/csrc/inductor/cpp_prefix.h>"
    assert found.code.splitlines()[-1] == "}"
    assert found.others == ("triton_poi_fused_relu_1",)
    report = Report((Finding(Kind.LOGIC, "output[0]", "wrong", kernel=found),), Coverage())
    assert Report.from_json(report.to_json()).findings[0].kernel == found


def test_a_kernel_of_triton_has_no_path_of_the_machine() -> None:
    found = kernel_in([module()], "forward", "neg", dynamo())
    assert (found.language, found.code.splitlines()[0]) == ("Triton", "import triton")
    assert "/home" not in found.code


def test_a_library_function_is_told_by_its_call() -> None:
    assert kernel_in([module()], "forward", "mm", dynamo()) == Kernel(
        "extern_kernels.mm",
        "call",
        "extern_kernels.mm(reinterpret_tensor(a, (4, 4), (1, 4), 0),\nb, out=buf0)",
        computes=("mm",),
    )


def test_a_node_of_dynamos_graph_is_found_by_what_was_made_from_it() -> None:
    assert kernel_in([module()], "dynamo", "linear", dynamo()).name == "extern_kernels.mm"
    with pytest.raises(CheckedBackendError, match="no kernel computes relu"):
        kernel_in([module()], "dynamo", "relu", dynamo())  # the name of another node there


def test_the_graph_of_the_finding_is_the_one_that_is_asked() -> None:
    modules = [module(), module("backward", made={"buf0": ["relu"]})]
    assert kernel_in(modules, "backward", "relu", dynamo()).name == "extern_kernels.mm"
    with pytest.raises(CheckedBackendError, match="no kernel computes add"):
        kernel_in(modules, "backward", "add", dynamo())


def test_nothing_is_made_up_where_there_is_no_code() -> None:
    with pytest.raises(CheckedBackendError, match="the compiler generated none"):
        kernel_in([], "forward", "relu", dynamo())
    with pytest.raises(CheckedBackendError, match="no kernel computes relu"):
        kernel_in([module(text="a = 'module that is written otherwise'")], "forward", "relu", dynamo())


def test_a_long_kernel_is_cut_and_says_so() -> None:
    lines = "\n".join(f"auto tmp{number} = {'x' * 40};" for number in range(2000))
    found = kernel_in([module(text=TEXT.replace("{\n", "{\n" + lines, 1))], "forward", "relu", dynamo())
    assert len(found.code) <= 24_000
    assert found.lines_left_out > 1500
    assert len(found.code.splitlines()) + found.lines_left_out == 2004
    one = kernel_in([module(text=TEXT.replace("{\n", "{" + "x" * 100_000, 1))], "forward", "relu", dynamo())
    assert len(one.code) <= 24_000


@pytest.mark.inductor
def test_inductor_says_which_call_computes_a_node_and_is_left_as_it_was() -> None:
    before = CompiledFxGraph.__init__, CompiledFxGraph.after_deserialization
    net, x = nn.Linear(4, 4, bias=False), torch.randn(3, 4)  # no kernel of its own: no C++ is compiled
    found: list[GeneratedModule] = []
    with without_compile_caches(), generated_modules_noted(found):
        torch.compile(net)(x).sum().backward()
    assert [module.kind for module in found] == ["forward", "backward"]
    forward = kernel_in(found, "forward", "mm", dynamo())
    assert (forward.name, forward.language) == ("extern_kernels.mm", "call")
    assert "out=buf0" in forward.code
    assert kernel_in(found, "dynamo", "linear", dynamo()) == forward
    assert kernel_in(found, "backward", "mm_1", dynamo()).name == "extern_kernels.mm"
    assert (CompiledFxGraph.__init__, CompiledFxGraph.after_deserialization) == before


@pytest.mark.inductor
def test_inductor_is_left_as_it_was_after_an_error() -> None:
    before = CompiledFxGraph.__init__, CompiledFxGraph.after_deserialization
    with pytest.raises(ZeroDivisionError), generated_modules_noted([]):
        raise ZeroDivisionError
    assert (CompiledFxGraph.__init__, CompiledFxGraph.after_deserialization) == before


@pytest.mark.slow
@pytest.mark.inductor
def test_a_kernel_of_inductor_has_the_operators_that_it_fuses() -> None:
    def program(x: Tensor) -> Tensor:
        return torch.relu(x + 1) * 3

    found: list[GeneratedModule] = []
    with without_compile_caches(), generated_modules_noted(found):
        torch.compile(program)(torch.randn(100, requires_grad=True)).sum().backward()
    forward = kernel_in(found, "forward", "relu", dynamo())
    assert forward.language == "C++"
    assert {"add", "relu", "mul"} <= set(forward.computes)
    assert "clamp_min" in forward.code
    backward = kernel_in(found, "backward", "where", dynamo())
    assert "relu" not in forward.others
    assert backward.name != forward.name
