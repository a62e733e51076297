"""What a dump says it cannot hold."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table, triton_kernel_wrapper_mutation
from torch.testing._internal.two_tensor import TwoTensor

import checked_backend as cb
from checked_backend.dump import render_dump
from tests.support.dump_tools import observed, python


def test_a_module_that_a_graph_calls_is_said(tmp_path: Path) -> None:
    called = fx.symbolic_trace(nn.Sequential(OrderedDict(lstm=nn.LSTM(4, 4))))  # fx leaves torch's own modules as calls
    dump = observed("dynamo", called, [torch.randn(2, 3, 4)], tmp_path)
    assert dump.metadata["unsupported"] == ["node lstm calls the module lstm"]
    assert "cannot be run from the dump: node lstm calls the module lstm" in render_dump(dump)
    assert "node lstm calls the module lstm" in (dump.path / "module.py").read_text()
    with pytest.raises(cb.DumpError, match=r"graph\.json: this graph cannot be run.*calls the module lstm"):
        _ = dump.module


def test_an_attribute_that_a_dump_cannot_name_is_said(tmp_path: Path) -> None:
    graph, values = fx.Graph(), {"0": torch.ones(3), "sparse": torch.eye(3).to_sparse()}
    graph.output(tuple(graph.get_attr(name) for name in values))
    dump = observed("dynamo", fx.GraphModule(values, graph), [], tmp_path)
    assert dump.metadata["unsupported"] == [
        "attribute 0 has a name that is no identifier",
        "attribute sparse is a tensor of layout torch.sparse_coo",
    ]
    assert "cannot be run from the dump: attribute 0 has" in render_dump(dump)


@pytest.mark.process
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta:UserWarning")
def test_inputs_that_a_dump_cannot_hold_are_said(tmp_path: Path) -> None:
    graph = fx.Graph()
    nodes = [graph.placeholder(name) for name in ("plain", "sparse", "rows", "two")]
    graph.output(tuple(nodes))
    two = TwoTensor(torch.ones(2), torch.ones(2))
    args = [torch.ones(2), torch.eye(2).to_sparse(), torch.eye(2).to_sparse_csr(), two]
    dump = observed("dynamo", fx.GraphModule(nn.Module(), graph), args, tmp_path)
    text = render_dump(dump)
    for said in (
        "input sparse is a tensor of layout torch.sparse_coo",
        "input rows is a tensor of layout torch.sparse_csr",
        "input two is a tensor subclass torch.testing._internal.two_tensor.TwoTensor",
    ):
        assert f"cannot be run from the dump: {said}" in text
    with pytest.raises(cb.DumpError, match="sparse is a tensor of layout"):
        dump.inputs()
    done = python("repro.py", folder=dump.path)
    assert done.returncode == 1
    assert "input sparse is a tensor of layout torch.sparse_coo, which a dump cannot hold" in done.stderr


def add_kernel(x: Any, out: Any, count: int) -> None:
    """Stands for a Triton kernel: torch keeps it in a table of the process, and graphs name its place there."""


@pytest.mark.process
def test_a_triton_kernel_is_shown_and_refused(tmp_path: Path) -> None:
    place = kernel_side_table.add_kernel(add_kernel)
    graph = fx.Graph()
    x, out = graph.placeholder("x"), graph.placeholder("out")
    rest = {"constant_args_idx": 0, "grid": [(1, 1, 1)], "tma_descriptor_metadata": {}}
    kwargs = {"kernel_idx": place, **rest, "kwargs": {"x": x, "out": out}}
    graph.call_function(triton_kernel_wrapper_mutation, (), kwargs)
    graph.output((graph.call_function(torch.ops.aten.sin.default, (out,)),))
    dump = observed("dynamo", fx.GraphModule(nn.Module(), graph), [torch.ones(2), torch.ones(2)], tmp_path)
    why = f"runs the Triton kernel {__name__}:add_kernel"
    assert dump.metadata["requires"] == [__name__]
    text = render_dump(dump)
    assert f"needs: import {__name__}" in text
    assert f"cannot be run from the dump: node triton_kernel_wrapper_mutation {why}" in text
    assert "= aten.sin.default(out)" in text
    assert why in (dump.path / "module.py").read_text()
    assert [value.tolist() for value in dump.inputs()] == [[1, 1], [1, 1]]
    with pytest.raises(cb.DumpError, match=f"cannot be run from its dump: node .* {why}"):
        _ = dump.module
    done = python("repro.py", folder=dump.path)
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1].endswith(why)
    assert "Traceback" not in done.stderr
