from __future__ import annotations

import gc
import shutil
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from functorch.compile import aot_function, aot_module
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch.fx.experimental.proxy_tensor import make_fx

import checked_backend as cb
from checked_backend import aot_compilers as aot
from checked_backend.aot.boxed import AotCompiler, boxed_module
from checked_backend.report.dot import graph_to_dot

BY_NAME: dict[str, AotCompiler] = {
    "nop": aot.nop,
    "print_graph": aot.print_graph,
    "interpret": aot.interpret,
    "torchscript": aot.torchscript,
}


def compilers(tmp_path: Path) -> dict[str, AotCompiler]:
    return {**BY_NAME, "draw_graph": aot.draw_graph(tmp_path / "drawing")}


def loss_fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ w).square().sum()


def step(function: Callable[..., torch.Tensor], x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
    x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
    loss = function(x, w)
    loss.backward()
    return [loss.detach(), x.grad, w.grad]  # type: ignore[list-item]


def trace(function: Callable[..., Any], *args: Any) -> fx.GraphModule:
    return make_fx(function, tracing_mode="fake")(*args)


@pytest.mark.parametrize("name", [*BY_NAME, "draw_graph"])
@pytest.mark.parametrize("entry", ["aot_autograd", "aot_function", "aot_module"])
def test_every_compiler_gives_eagers_bits(name: str, entry: str, tmp_path: Path) -> None:
    compiler = compilers(tmp_path)[name]
    x, w = torch.randn(5, 4), torch.randn(4, 3)
    expected = step(loss_fn, x, w)
    if entry == "aot_autograd":
        actual = step(torch.compile(loss_fn, backend=aot_autograd(fw_compiler=compiler)), x, w)
    elif entry == "aot_function":
        actual = step(aot_function(loss_fn, fw_compiler=compiler, bw_compiler=compiler), x, w)
    else:
        module = torch.nn.Linear(4, 3)
        compiled = aot_module(module, fw_compiler=compiler, bw_compiler=compiler)
        module(x).square().sum().backward()
        expected = [p.grad.clone() for p in module.parameters()]  # type: ignore[union-attr]
        module.zero_grad()
        compiled(x).square().sum().backward()
        actual = [p.grad for p in module.parameters()]  # type: ignore[misc]
    for reference, candidate in zip(expected, actual, strict=True):
        assert torch.equal(reference, candidate)


@pytest.mark.parametrize("name", [*BY_NAME, "draw_graph"])
def test_boxed_callables_empty_their_argument_list(name: str, tmp_path: Path) -> None:
    x = torch.randn(3)
    gm = trace(lambda t: (t + 1,), x)
    run = compilers(tmp_path)[name](gm, [x])
    assert run._boxed_call is True  # type: ignore[attr-defined]
    args = [x]
    (out,) = run(args)
    assert args == []
    assert torch.equal(out, x + 1)


@pytest.mark.parametrize("compiler", [aot.nop, aot.interpret])
def test_an_input_is_freed_before_the_graph_has_finished(compiler: AotCompiler) -> None:
    alive: list[bool] = []
    watched: list[weakref.ref[torch.Tensor]] = []

    def probe(value: torch.Tensor) -> torch.Tensor:
        gc.collect()
        alive.append(watched[0]() is not None)
        return value * 2

    graph = fx.Graph()
    x = graph.placeholder("x")
    doubled = graph.call_function(torch.ops.aten.mul.Tensor, (x, 2))
    graph.output((graph.call_function(probe, (doubled,)),))
    run = compiler(fx.GraphModule(torch.nn.Module(), graph), [])
    args = [torch.ones(3)]
    watched.append(weakref.ref(args[0]))
    (out,) = run(args)
    assert alive == [False]
    assert torch.equal(out, torch.full((3,), 4.0))


def test_nop_runs_graphs_of_no_inputs_and_leaves_the_given_graph_alone() -> None:
    gm = trace(lambda: (torch.ones(2),))
    before = gm.code
    assert torch.equal(aot.nop(gm, [])([])[0], torch.ones(2))
    assert gm.code == before
    assert torch.equal(gm()[0], torch.ones(2))


def test_an_exception_of_the_graph_is_the_operators_own(capsys: pytest.CaptureFixture[str]) -> None:
    gm = trace(lambda a, b: (a @ b,), torch.ones(2, 3), torch.ones(3, 2))
    for compiler in (aot.nop, aot.interpret):
        with pytest.raises(RuntimeError, match=r"must have|cannot be multiplied|size mismatch") as caught:
            compiler(gm, [])([torch.ones(2, 3), torch.ones(2, 2)])
        assert "While executing" not in str(caught.value)
    assert capsys.readouterr().err == ""


def test_print_graph_writes_the_readable_graph(capsys: pytest.CaptureFixture[str]) -> None:
    x = torch.randn(3)
    aot.print_graph(trace(lambda t: (t.relu(),), x), [x])
    assert "torch.ops.aten.relu.default" in capsys.readouterr().out


def test_draw_graph_numbers_its_drawings(tmp_path: Path) -> None:
    x = torch.randn(3)
    compiler = aot.draw_graph(tmp_path / "deep" / "drawing")
    for _ in range(2):
        compiler(trace(lambda t: (t.relu(),), x), [x])
    folder = tmp_path / "deep" / "drawing"
    expected = {"graph.dot", "graph_1.dot"}
    if shutil.which("dot"):
        expected |= {"graph.svg", "graph_1.svg"}
    assert {path.name for path in folder.iterdir()} == expected
    text = (folder / "graph.dot").read_text()
    assert text.startswith('digraph "drawing" {')
    assert "aten.relu.default" in text
    assert "float32[3] strides (1)" in text
    assert text.count(" -> ") == 2


def test_draw_graph_says_what_it_cannot_write(tmp_path: Path) -> None:
    x = torch.randn(3)
    (tmp_path / "file").touch()
    with pytest.raises(cb.DumpError, match=r"cannot make the folder .*file.*Give draw_graph another one"):
        aot.draw_graph(tmp_path / "file" / "drawing")(trace(lambda t: (t.relu(),), x), [x])
    (tmp_path / "drawing" / "graph.dot").mkdir(parents=True)
    with pytest.warns(cb.DumpWarning, match=r"graph\.dot was not drawn, the program goes on"):
        run = aot.draw_graph(tmp_path / "drawing")(trace(lambda t: (t.relu(),), x), [x])
    assert torch.equal(run([x])[0], x.relu())


@pytest.mark.process
@pytest.mark.skipif(sys.platform == "win32", reason="needs an executable shell script")
def test_draw_graph_runs_graphviz_where_it_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "bin" / "dot"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\ncp "$2" "$4"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")
    x = torch.randn(3)
    aot.draw_graph(tmp_path / "drawing")(trace(lambda t: (t.relu(),), x), [x])
    assert (tmp_path / "drawing" / "graph.svg").is_file()


def test_dot_text_has_no_quote_in_a_string() -> None:
    """Netron's reader does not know an escaped one."""
    assert "digraph \"say 'hi'\" {" in graph_to_dot(trace(lambda t: (t.relu(),), torch.randn(2)).graph, 'say "hi"')


def test_torchscript_refuses_symbolic_sizes() -> None:
    compiled = torch.compile(
        lambda x: x.view(-1).cos() * x.shape[0], backend=aot_autograd(fw_compiler=aot.torchscript), dynamic=True
    )
    with pytest.raises(Exception, match=r"symbolic sizes .* dynamic=False") as caught:
        compiled(torch.randn(3, 2))
    assert isinstance(getattr(caught.value, "inner_exception", None), cb.CandidateError)


@pytest.mark.parametrize("given", [(torch.ones(3), 3), (torch.ones(3), 2.5), (torch.ones(3), True)], ids=str)
def test_torchscript_takes_numbers(given: tuple[Any, ...]) -> None:
    def scaled(x: torch.Tensor, by: float) -> torch.Tensor:
        return x.sin() * by

    compiled = aot_function(scaled, fw_compiler=aot.torchscript, bw_compiler=aot.torchscript)
    assert torch.equal(compiled(*given), scaled(*given))


@pytest.mark.parametrize("entry", ["aot_autograd", "aot_function"])
def test_torchscript_computes_constants_with_real_tensors(entry: str) -> None:
    def constant(x: torch.Tensor) -> torch.Tensor:
        return torch.ones(3, device=x.device) * 2

    x = torch.ones(3)
    if entry == "aot_autograd":
        compiled = torch.compile(constant, backend=aot_autograd(fw_compiler=aot.torchscript))
    else:
        compiled = aot_function(constant, fw_compiler=aot.torchscript)
    assert [compiled(x).tolist() for _ in range(3)] == [[2.0, 2.0, 2.0]] * 3


def test_torchscript_says_what_it_cannot_express() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(lambda x, *, size: x, (x,), {"size": {"a": 1}}),))
    with pytest.raises(cb.CandidateError, match="TorchScript rejected the graph"):
        aot.torchscript(fx.GraphModule(torch.nn.Module(), graph), [])


def test_torchscript_is_a_typed_error_where_torch_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.jit, "script")
    with pytest.raises(cb.CandidateError, match=r"has no torch\.jit\.script"):
        aot.torchscript(trace(lambda t: (t + 1,), torch.ones(1)), [])


def test_torchscript_leaves_the_autocast_pass_as_it_was() -> None:
    before = torch._C._jit_set_autocast_mode(True)
    try:
        x = torch.randn(3)
        aot.torchscript(trace(lambda t: (t.relu(),), x), [x])
        assert torch._C._jit_set_autocast_mode(True) is True
    finally:
        torch._C._jit_set_autocast_mode(before)


def test_boxed_module_keeps_submodules_of_higher_order_operators() -> None:
    def choose(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda t: t.sin(), lambda t: t.cos(), (x,))

    x = torch.ones(3)
    run = torch.compile(choose, backend=aot_autograd(fw_compiler=lambda gm, _inputs: boxed_module(gm)))
    assert torch.equal(run(x), x.sin())
    assert torch.equal(run(-x), (-x).cos())
