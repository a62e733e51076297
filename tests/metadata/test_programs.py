"""Programs as users write them: torch's own wrong metadata, control flow, subclasses, effects, sizes from data."""

from __future__ import annotations

import math
import subprocess
import sys
import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import sympy
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.two_tensor import TwoTensor

import checked_backend as cb
from checked_backend._torch.symbols import evaluate_expression
from checked_backend.metadata.interpreter import MetadataInterpreter
from checked_backend.metadata.symbols import SizeValues
from tests.support.lying_operators import NAME, define, local, transposed, with_effect
from tests.support.lying_operators import record as checked
from tests.support.region_tools import agreed


def pad(x: torch.Tensor) -> torch.Tensor:
    return F.pad(x, (1, 1, 1, 1), mode="replicate")


def channels_last(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).to(memory_format=torch.channels_last).requires_grad_()


@pytest.mark.process
@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="wrong in torch 2.13's own metadata")
@pytest.mark.parametrize("dynamic", [False, True])
def test_the_wrong_strides_of_replication_pad2d_backward_are_found_on_the_users_line(dynamic: bool) -> None:
    out = torch.compile(pad, backend="debug_interpreter", dynamic=dynamic)(channels_last(2, 3, 4, 5))
    with pytest.raises(cb.MetadataError) as caught:
        out.sum().backward()
    finding, text = caught.value.finding, str(caught.value)
    assert (finding.op, finding.graph) == ("aten.replication_pad2d_backward.default", "backward")
    assert (finding.detail, finding.actual) == ("structure.stride", "(60, 1, 15, 3)")
    assert "test_programs.py:" in finding.source
    assert finding.source.endswith('in pad: return F.pad(x, (1, 1, 1, 1), mode="replicate")')
    assert "contiguous recorded, channels_last ran" in text
    assert "Python meta function of aten.replication_pad2d_backward.default" in text
    assert "_meta_registrations.py:" in text
    done = subprocess.run([sys.executable, finding.repro], capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert "THEY DIFFER" in done.stderr
    assert "[60, 20, 5, 1]" in done.stdout
    assert "[60, 1, 15, 3]" in done.stdout


def test_graphs_inside_of_cond_are_checked_on_both_branches(library: Any) -> None:
    liar = define(library, "liar(Tensor x) -> Tensor", transposed, torch.empty_like)

    def program(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda x: liar(x).sin(), lambda x: x.cos(), (x,))

    with torch.no_grad():
        report = checked(program, (-torch.ones(3, 4),))
        assert report.findings == ()
        assert sum(report.coverage.checked.values()) >= 6  # the nodes inside are counted
        report = checked(program, (torch.ones(3, 4),), (torch.ones(3, 4),))
    first, *rest = report.findings
    assert (first.subject, first.op) == ("node[true_graph_0 of cond: liar]", f"{NAME}.liar.default")
    assert "liar(x).sin()" in first.source
    assert all(finding.evidence["inherited"] for finding in rest)


def test_subclasses_effects_and_complex_numbers() -> None:
    subclass = TwoTensor(torch.randn(3, 4), torch.randn(3, 4))
    agreed(checked(lambda x: (x * 2).t().relu(), (subclass,)))
    number = torch.randn(3, 4, dtype=torch.complex64)
    agreed(checked(lambda x: ((x.conj() * 2).imag, x.conj(), x.conj().imag, x.resolve_conj()), (number,)))


def test_effect_tokens_are_no_values(library: Any) -> None:
    log = define(library, "log(Tensor x) -> Tensor", lambda x: x.clone(), torch.empty_like)
    with with_effect(log):
        agreed(checked(lambda x: log(x) + log(x * 2), (torch.ones(3),)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, None])
def test_training_under_autocast(dtype: torch.dtype | None) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.GELU(), nn.Linear(8, 2))
    with nullcontext() if dtype is None else torch.autocast("cpu", dtype=dtype):
        report = agreed(checked(model, (torch.randn(3, 4),), (torch.randn(3, 4),)))
    assert {"nodes of the forward graph", "nodes of the backward graph"} <= set(report.coverage.checked)


def test_layer_norm_statistics_under_autocast_are_wrong_in_torchs_metadata() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        report = checked(model, (torch.randn(3, 4),))
    told = [(f.op, f.subject[-3:], f.expected, f.actual) for f in local(report)]
    norm, dtypes = "aten.native_layer_norm.default", ("torch.bfloat16", "torch.float32")
    assert told == [(norm, "[1]", *dtypes), (norm, "[2]", *dtypes)]
    # the backward graph is handed what the forward graph made: that is no second problem
    assert {f.graph for f in report.findings if f.evidence["inherited"]} == {"backward"}


def sizes(x: torch.Tensor) -> Any:
    count = x.sum().int().item()
    torch._check(count >= 0)
    torch._check(count < 20)
    return torch.zeros(count + 2).sum() + x.nonzero().sum() + x[x > 0].sum(), count, x.any().item()


@torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True)
def test_sizes_that_depend_on_data() -> None:
    agreed(checked(sizes, (torch.ones(3),), (torch.tensor([1.0, 0, 2]),)))
    compiled = torch.compile(sizes, backend=cb.debug_interpreter)
    with pytest.raises(RuntimeError):  # as in eager
        compiled(torch.full((3,), 9.0))


def test_a_deferred_assertion_that_no_node_holds_is_checked() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        count = x.sum().int().item()
        torch._check(count < 20)
        return torch.zeros(3) + count

    gm = make_fx(program, tracing_mode="symbolic")(torch.ones(3))
    for node in reversed(gm.graph.nodes):
        if "assert" in str(node.target):
            gm.graph.erase_node(node)
    gm.graph.eliminate_dead_code()
    gm.recompile()
    found: list[cb.Finding] = []
    interpreter = MetadataInterpreter(gm, "inference", found.extend)
    interpreter([torch.ones(3)])
    assert found == []
    interpreter([torch.full((3,), 9.0)])
    assert [(f.kind, f.detail) for f in found] == [(cb.Kind.STRUCTURE, "structure.assert")]
    assert "=27" in str(found[0].actual)


def test_an_input_may_begin_elsewhere_in_its_storage() -> None:
    memory = torch.randn(20)
    agreed(checked(lambda x: (x[1:].sin(), x[2:], x), (memory[:10],), (memory[3:13],)))


def test_dynamic_views() -> None:
    def program(x: torch.Tensor) -> Any:
        return x.reshape(-1)[::2].view(2, -1).sum(0) + 1, x[1:, 2:], x.unfold(0, 2, 1), x.t().flatten()

    calls = [(torch.randn(rows, 8)[start:],) for rows, start in ((4, 0), (8, 2), (10, 0), (12, 4))]
    agreed(checked(program, *calls, dynamic=True))


def test_the_first_nan_is_named_with_the_range_of_its_inputs() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        y = x - 1
        return (y.log() + 1).exp()

    compiled = torch.compile(program, backend=cb.debug_interpreter, options={"nonfinite": True})
    compiled(torch.tensor([3.0, 2.0]))
    with pytest.raises(cb.MetadataError, match=r"made NaN of finite inputs \(inputs: sub in \[-0\.5, 2\]\)") as caught:
        compiled(torch.tensor([3.0, 0.5]))
    finding = caught.value.finding
    assert (finding.kind, finding.op) == (cb.Kind.NONFINITE, "aten.log.default")
    assert finding.source.endswith("return (y.log() + 1).exp()")
    torch._dynamo.reset()
    torch.compile(program, backend=cb.debug_interpreter)(torch.tensor([3.0, 0.5]))  # off by default


def test_values_are_freed_after_their_last_use() -> None:
    alive: list[int] = []
    made: list[weakref.ref[Any]] = []

    def watch(x: torch.Tensor) -> torch.Tensor:
        alive.append(sum(reference() is not None for reference in made))
        result = x + 1
        made.append(weakref.ref(result))
        return result

    graph = torch.fx.Graph()
    node = graph.placeholder("x")
    node.meta["val"] = torch.ones(2)
    for _ in range(5):
        node = graph.call_function(watch, (node,))
        node.meta["val"] = torch.ones(2)
    graph.output(node)
    args = [torch.ones(2)]
    given = weakref.ref(args[0])
    MetadataInterpreter(torch.fx.GraphModule(nn.Module(), graph), "forward", lambda _: None)(args)
    assert args == []
    assert given() is None
    assert alive == [0, 1, 1, 1, 1]


def test_symbolic_sizes_are_what_sympy_says() -> None:
    def program(x: torch.Tensor) -> Any:
        return x[::3].sum(1), x.view(-1).unfold(0, 4, 3), x[:, 1::2].cumsum(0), torch.cat([x, x[1:]], 0)

    gm = make_fx(program, tracing_mode="symbolic")(torch.randn(7, 12))
    interpreter = MetadataInterpreter(gm, "inference", lambda found: pytest.fail(str(found)))
    table, inputs = interpreter.graph.symbols, [size.node.expr for size in next(iter(gm.graph.nodes)).meta["val"].shape]
    recorded = [leaf for step in interpreter.graph.steps for leaf in step.leaves or ()]
    sizes = {size for leaf in recorded for size in leaf.shape if isinstance(size, sympy.Basic) and not size.is_Symbol}
    assert len(sizes) >= 4
    for real in ((7, 12), (11, 9), (20, 33)):
        interpreter([torch.randn(*real)])
        values = SizeValues(table)
        values.update(zip(inputs, real, strict=True))
        assert all(values[size] == evaluate_expression(size, dict(values)) for size in sizes)
        assert all("forward" in table.function(size).__code__.co_name for size in sizes), "Python, not interpreted"


def test_symbolic_numbers_that_are_no_integers() -> None:
    def program(x: torch.Tensor) -> Any:
        rows, columns = x.shape
        floats = rows**0.5, rows / 3, rows * 1.5 + x.numel() * 0.25, torch.sym_sqrt(columns), columns**-0.5
        return *floats, round(rows / 3, 2), math.ceil(rows / 2), int(rows / 2), x * rows**-0.5, rows % 4 / columns

    calls = [(torch.randn(4, 6),), (torch.randn(7, 5),), (torch.randn(9, 5),)]
    agreed(checked(program, *calls, dynamic=True))
