"""The generated code of one operator, cut out of what Inductor generates."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest
import torch
from torch import Tensor, nn
from torch._inductor import config
from torch._inductor.graph import GraphLowering

from checked_backend._torch.caches import without_compile_caches
from checked_backend._torch.output_code import OutputCode, output_code_noted
from checked_backend.diagnose.localize.kernel import kernel_in, kernel_of_json
from checked_backend.errors import CheckedBackendError
from checked_backend.findings import Kernel

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

    def call(self, args):
        # [Provenance debug handles] extern_kernels.mm:1
        # Topologically Sorted Source Nodes: [linear], Original ATen: [aten.mm]
        extern_kernels.mm(reinterpret_tensor(a, (4, 4), (1, 4), 0),
            b, out=buf0)
        del a
        # [Provenance debug handles] cpp_fused_add_relu_0:2
        cpp_fused_add_relu_0(buf0, buf1)
        # [Provenance debug handles] triton_poi_fused_relu_1:3
        triton_poi_fused_relu_1.run(buf1, 4)
"""
CODE = OutputCode(
    "forward",
    TEXT,
    {
        "extern_kernels.mm:1": ("mm",),
        "cpp_fused_add_relu_0:2": ("add", "relu"),
        "triton_poi_fused_relu_1:3": ("relu", "neg"),
    },
    {"mm": "linear", "add": "y", "relu": "z"},
)


def test_a_kernel_is_given_with_its_source_and_what_else_it_computes() -> None:
    found = kernel_in([CODE], "forward", "relu")
    assert (found.name, found.language, found.computes) == ("cpp_fused_add_relu_0", "C++", ("add", "relu"))
    assert found.code.splitlines()[0] == "#include <torch/csrc/inductor/cpp_prefix.h>"
    assert found.code.splitlines()[-1] == "}"
    assert found.others == ("triton_poi_fused_relu_1",)
    assert kernel_of_json(json.loads(json.dumps(asdict(found)))) == found


def test_a_kernel_of_triton_has_no_path_of_the_machine() -> None:
    found = kernel_in([CODE], "forward", "neg")
    assert (found.language, found.code.splitlines()[0]) == ("Triton", "import triton")
    assert "/home" not in found.code


def test_a_library_function_is_told_by_its_call() -> None:
    assert kernel_in([CODE], "forward", "mm") == Kernel(
        "extern_kernels.mm",
        "call",
        "extern_kernels.mm(reinterpret_tensor(a, (4, 4), (1, 4), 0),\nb, out=buf0)",
        computes=("mm",),
    )


def test_a_node_of_dynamos_graph_is_found_by_what_was_made_from_it() -> None:
    assert kernel_in([CODE], "dynamo", "linear").name == "extern_kernels.mm"
    with pytest.raises(CheckedBackendError, match="no kernel says that it computes relu"):
        kernel_in([CODE], "dynamo", "relu")  # the name of another node there


def test_the_graph_of_the_finding_is_the_one_that_is_asked() -> None:
    backward = replace(CODE, kind="backward", computed={"extern_kernels.mm:1": ("relu",)})
    assert kernel_in([CODE, backward], "backward", "relu").name == "extern_kernels.mm"
    with pytest.raises(CheckedBackendError, match="no kernel says that it computes add"):
        kernel_in([CODE, backward], "backward", "add")


def test_nothing_is_made_up_where_there_is_no_code() -> None:
    with pytest.raises(CheckedBackendError, match="the compiler generated none"):
        kernel_in([], "forward", "relu")
    gone = replace(CODE, text="a module that is written otherwise")
    with pytest.raises(CheckedBackendError, match="no kernel says"):
        kernel_in([gone], "forward", "relu")


def test_a_long_kernel_is_cut_and_says_so() -> None:
    lines = "\n".join(f"auto tmp{number} = {'x' * 40};" for number in range(2000))
    found = kernel_in([replace(CODE, text=TEXT.replace("{\n", "{\n" + lines, 1))], "forward", "relu")
    assert len(found.code) <= 24_000
    assert found.lines_left_out > 1500
    assert len(found.code.splitlines()) + found.lines_left_out == 2004
    one = kernel_in([replace(CODE, text=TEXT.replace("{\n", "{" + "x" * 100_000, 1))], "forward", "relu")
    assert len(one.code) <= 24_000


@pytest.mark.inductor
def test_inductor_says_which_call_computes_a_node_and_is_left_as_it_was() -> None:
    before = GraphLowering.save_output_code, config.trace.provenance_tracking_level
    net, x = nn.Linear(4, 4, bias=False), torch.randn(3, 4)  # no kernel of its own: no C++ is compiled
    found: list[OutputCode] = []
    with without_compile_caches(), output_code_noted(found):
        torch.compile(net)(x)
    assert [code.kind for code in found] == ["forward", "backward"]  # it was not run
    forward = kernel_in(found, "forward", "mm")
    assert (forward.name, forward.language) == ("extern_kernels.mm", "call")
    assert "out=buf0" in forward.code
    assert kernel_in(found, "dynamo", "linear") == forward
    assert kernel_in(found, "backward", "mm_1").name == "extern_kernels.mm"
    assert (GraphLowering.save_output_code, config.trace.provenance_tracking_level) == before


@pytest.mark.inductor
def test_inductor_is_left_as_it_was_after_an_error() -> None:
    before = GraphLowering.save_output_code
    with pytest.raises(ZeroDivisionError), output_code_noted([]):
        raise ZeroDivisionError
    assert GraphLowering.save_output_code is before


@pytest.mark.slow
@pytest.mark.inductor
def test_a_kernel_of_inductor_has_the_operators_that_it_fuses() -> None:
    def program(x: Tensor) -> Tensor:
        return torch.relu(x + 1) * 3

    found: list[OutputCode] = []
    with without_compile_caches(), output_code_noted(found):
        torch.compile(program)(torch.randn(100, requires_grad=True))
    forward = kernel_in(found, "forward", "relu")
    assert forward.language == "C++"
    assert {"add", "relu", "mul"} <= set(forward.computes)
    assert "clamp_min" in forward.code
    backward = kernel_in(found, "backward", "where")
    assert "relu" not in forward.others
    assert backward.name != forward.name
