"""The generated code of one operator, cut out of what Inductor generates, and the script that runs it alone."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, fx, nn
from torch._inductor.output_code import CompiledFxGraph

import checked_backend as cb
from checked_backend._torch.caches import without_compile_caches
from checked_backend._torch.generated_modules import GeneratedModule, generated_modules_noted
from checked_backend.diagnose.kernel import kernel_code, kernel_in
from checked_backend.diagnose.localize.probe import faulty_operator
from checked_backend.diagnose.repro.repro import write_kernel_repro
from checked_backend.findings import Coverage, Finding, Kernel, Kind
from checked_backend.options import CheckOptions
from checked_backend.regions.inputs import copy_values
from checked_backend.regions.operator_check.in_place import CheckedModule, KernelCheck
from tests.support import region_tools
from tests.support.planted import Fault, in_half_precision, planted

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
    report = cb.Report((Finding(Kind.LOGIC, "output[0]", "wrong", kernel=found),), Coverage())
    assert cb.Report.from_json(report.to_json()).findings[0].kernel == found


def test_a_kernel_of_triton_has_no_path_of_the_machine() -> None:
    found = kernel_in([module()], "forward", "neg", dynamo())
    assert (found.language, found.code.splitlines()[0]) == ("Triton", "import triton")
    assert "/home" not in found.code


def test_a_library_function_is_told_by_its_call() -> None:
    code = "extern_kernels.mm(reinterpret_tensor(a, (4, 4), (1, 4), 0),\nb, out=buf0)"
    kernel = Kernel("extern_kernels.mm", "call", code, computes=("mm",))
    assert kernel_in([module()], "forward", "mm", dynamo()) == kernel


def test_a_node_of_dynamos_graph_is_found_by_what_was_made_from_it() -> None:
    assert kernel_in([module()], "dynamo", "linear", dynamo()).name == "extern_kernels.mm"
    with pytest.raises(cb.CheckedBackendError, match="no kernel computes relu"):
        kernel_in([module()], "dynamo", "relu", dynamo())  # the name of another node there


def test_the_graph_of_the_finding_is_the_one_that_is_asked() -> None:
    modules = [module(), module("backward", made={"buf0": ["relu"]})]
    assert kernel_in(modules, "backward", "relu", dynamo()).name == "extern_kernels.mm"
    with pytest.raises(cb.CheckedBackendError, match="no kernel computes add"):
        kernel_in(modules, "backward", "add", dynamo())


def test_nothing_is_made_up_where_there_is_no_code() -> None:
    with pytest.raises(cb.CheckedBackendError, match="the compiler generated none"):
        kernel_in([], "forward", "relu", dynamo())
    with pytest.raises(cb.CheckedBackendError, match="no kernel computes relu"):
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
def test_inductor_says_which_call_computes_a_node_and_is_left_as_it_was_also_after_an_error() -> None:
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
    with pytest.raises(ZeroDivisionError), generated_modules_noted([]):
        raise ZeroDivisionError
    assert (CompiledFxGraph.__init__, CompiledFxGraph.after_deserialization) == before


@pytest.mark.slow
@pytest.mark.inductor
def test_a_kernel_of_inductor_has_the_operators_that_it_fuses() -> None:
    found: list[GeneratedModule] = []
    with without_compile_caches(), generated_modules_noted(found):
        torch.compile(lambda x: torch.relu(x + 1) * 3)(torch.randn(100, requires_grad=True)).sum().backward()
    forward = kernel_in(found, "forward", "relu", dynamo())
    assert forward.language == "C++"
    assert {"add", "relu", "mul"} <= set(forward.computes)
    assert "clamp_min" in forward.code
    backward = kernel_in(found, "backward", "where", dynamo())
    assert "relu" not in forward.others
    assert backward.name != forward.name


pytestmark = [pytest.mark.inductor]


def attention(x: Tensor, w: Tensor) -> Tensor:
    y = torch.layer_norm(x @ w, (24,)).tanh()
    return torch.softmax(y @ w.t(), -1) * y.sum(1, keepdim=True)


def variance(x: Tensor, w: Tensor) -> Tensor:
    """Kernels hand on sums that are no node's values."""
    y = x @ w
    return (y - y.float().mean(1, keepdim=True)) / (1 + y.float().var(0))


def joined(x: Tensor, w: Tensor) -> Tensor:
    """Several kernels write to parts of one buffer."""
    return torch.cat([x @ w, (x @ w.exp()).sin(), w[:16].cos()]) @ w.t()


def gathered(x: Tensor, w: Tensor) -> Tensor:
    """The kernel of the gradient fills a buffer, and adds to it. The places are a constant of the graph."""
    return torch.tanh(x @ w)[torch.tensor([1, 3, 1, 0] * 4)].exp()


STATE = torch.ones(16, 24, dtype=torch.bfloat16)


def kept(x: Tensor, w: Tensor) -> Tensor:
    """Kernels read an input that was written to before."""
    STATE.index_put_((torch.tensor([1, 3]),), (x @ w)[:2].detach())
    return (STATE @ w.t()).sin() * STATE.sum()


@torch.library.custom_op("test_kernel_code::double", mutates_args=("y",))
def double(x: Tensor, y: Tensor) -> None:
    y.copy_(x * 2)


def called(x: Tensor, w: Tensor) -> Tensor:
    """An operator of the user's own writes to a tensor that a kernel reads."""
    y = torch.zeros_like(x)
    double(x.detach(), y)
    return (y * x).sum(1)


def sine(x: Tensor, w: Tensor) -> Tensor:
    """Only its gradient calls ``cos``."""
    return torch.sin(x @ w) @ w.t()


def modules_of(function: Callable[..., Any], *, dynamic: bool | None = None) -> tuple[list[CheckedModule], cb.Report]:
    """What the kernels of one training step showed."""
    checked: list[CheckedModule] = []
    run = KernelCheck.run

    def noting(kernels: KernelCheck, *args: Any, **kwargs: Any) -> Any:
        found = run(kernels, *args, **kwargs)
        checked.extend(found)
        return found

    inputs = [torch.randn(size, dtype=torch.bfloat16).requires_grad_() for size in ((16, 32), (32, 24))]
    torch._dynamo.reset()
    with mock.patch.object(KernelCheck, "run", noting), without_compile_caches(), cb.collect() as session:
        region_tools.checked(function, "inductor", dynamic=dynamic)(*inputs).sum().backward()
    return checked, session.report


def call(lines: Sequence[str], inputs: Sequence[Any]) -> Tensor:
    names: dict[str, Any] = {"__name__": "__script__"}
    exec("import torch\n" + "\n".join(lines), names)
    with torch.no_grad():
        result: Tensor = names["compiled"](*copy_values(inputs))
    return result


@pytest.mark.parametrize(
    ("function", "dynamic"), [(attention, True), (variance, None), (joined, None), (gathered, True)]
)
def test_each_kernel_computes_alone_what_it_computed_in_the_program(
    function: Callable[..., Any], dynamic: bool | None
) -> None:
    checked, report = modules_of(function, dynamic=dynamic)
    assert report.verdict is cb.Verdict.PASS, report.to_text()
    assert {one.module.kind for one in checked} == {"forward", "backward"}
    for one in checked:
        for node in one.module.graph.graph.nodes:
            if node.name not in one.values:
                continue
            code = kernel_code(one, node, CheckOptions())
            assert code is not None, node
            found = call(code.lines, code.case.inputs)
            assert torch.equal(found, one.values[node.name]), "\n".join(code.lines)
            [eager] = code.case.graph(*copy_values(code.case.inputs))
            assert (eager.float() - found.float()).norm() <= 0.02 * eager.float().norm()
            text = "\n".join(code.lines)
            assert "benchmark" not in text  # nor anything else that it does not need
            assert f"return {next(name for name, held in one.module.held.items() if node in held)}" in text


def test_what_no_kernel_wrote_or_what_reads_too_much_has_no_code(monkeypatch: pytest.MonkeyPatch) -> None:
    [one, *_], _ = modules_of(attention)
    nodes = [*one.module.graph.graph.nodes]
    assert kernel_code(one, nodes[0], CheckOptions()) is None  # no kernel wrote an input
    node = next(node for node in nodes if node.name in one.values)
    assert kernel_code(one, node, CheckOptions()) is not None
    monkeypatch.setattr("checked_backend.diagnose.kernel.MOST_BYTES", 100)
    assert kernel_code(one, node, CheckOptions()) is None


@pytest.mark.parametrize(("function", "operator"), [(kept, "aten.sum.default"), (called, "aten.sum.dim_IntList")])
def test_what_reads_what_others_wrote_in_place_has_no_code(function: Callable[..., Any], operator: str) -> None:
    [one, *_], _ = modules_of(function)
    node = next(node for node in one.module.graph.graph.nodes if str(node.target) == operator)
    assert node.name in one.values
    assert kernel_code(one, node, CheckOptions()) is None


@pytest.mark.process
@pytest.mark.parametrize(("operator", "kind"), [("sin", "forward"), ("cos", "backward")])
def test_the_script_of_a_wrong_kernel_calls_no_compiler_and_is_kept_only_if_it_shows_it(
    tmp_path: Path, operator: str, kind: str
) -> None:
    with planted(Fault(operator, "pointwise", "lowering", in_half_precision)):
        checked, report = modules_of(sine)
    assert report.verdict is cb.Verdict.FAIL
    one, wrong = next((one, wrong) for one in checked for wrong in one.checks.wrong)
    assert one.module.kind == kind
    code = kernel_code(one, wrong.node, CheckOptions())
    finding = faulty_operator(wrong).finding
    repro = write_kernel_repro(code, finding, tmp_path, name=operator)
    text = repro.path.read_text()
    assert "torch.compile(" not in text
    assert "checked_backend" not in text
    assert f"torch.{operator}(" in text
    assert "void  kernel(" in text
    done = subprocess.run([sys.executable, str(repro.path)], capture_output=True, text=True)
    assert done.returncode == 1, done.stdout + done.stderr
    kept = {*tmp_path.iterdir()}
    right, _ = modules_of(sine)
    clean = next(other for other in right if other.module.kind == kind)
    node = next(node for node in clean.module.graph.graph.nodes if node.name == wrong.node.name)
    code = kernel_code(clean, node, CheckOptions())
    assert code is not None
    assert write_kernel_repro(code, finding, tmp_path, name=operator) is None
    assert {*tmp_path.iterdir()} == kept
