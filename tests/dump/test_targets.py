"""What nodes call, as text and back; and all that a dump may call is tried."""

from __future__ import annotations

import dis
import inspect
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn

from checked_backend._torch.operators import find_op_packet, has_dispatched, operator_names
from checked_backend.dump.arguments import BadArgument, decode_argument
from checked_backend.dump.encode import encode_graph
from checked_backend.dump.module import module_source
from checked_backend.dump.targets import (
    Unresolved,
    encode_target,
    functions,
    needed_import,
    operator_problem,
    refusal_by_name,
    resolve_target,
)
from tests.support.dump_tools import told_by

FUNCTIONS: list[Any] = [
    *(torch.rand_like, torch.randn_like, torch.randint_like, torch.zeros_like, torch.dropout, torch.arange),
    *(torch._foreach_add, torch._foreach_sqrt_, torch._weight_norm, torch._scaled_mm, torch._int_mm),
    *(torch.nn.functional.scaled_dot_product_attention, torch._C._nn.gelu, torch.Tensor.add_, torch.fft.rfft),
    *(torch._C._functorch._grad_increment_nesting, torch._C._functorch._wrap_for_grad, torch._C._set_grad_enabled),
    *(torch._C._autograd._get_data_attr, torch.autograd.grad_mode._enter_inference_mode),
    torch._functorch.eager_transforms._autograd_grad,
]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_a_function_that_dynamo_writes_needs_nothing_and_comes_back(function: Any) -> None:
    text = encode_target("call_function", function)
    assert needed_import(text) is None
    assert resolve_target(text) is function
    graph = fx.Graph()
    graph.output(graph.call_function(function, (graph.placeholder("x"),)))
    gm = fx.GraphModule(nn.Module(), graph)
    source = module_source(gm, encode_graph(gm), "title", "2")
    names: dict[str, Any] = {}
    exec(compile(source, "module.py", "exec"), names)  # importable: each name it uses is there
    assert "cannot be imported" not in source
    instructions = dis.get_instructions(names["GraphModule"].forward)
    assert {one.argval for one in instructions if one.opname == "LOAD_GLOBAL"} <= names.keys()


@pytest.mark.parametrize("name", ["from_file", "load", "save", "compile", "_C._jit_pass_dce"])
def test_functions_of_torch_that_do_not_compute_are_refused(name: str) -> None:
    with pytest.raises(Unresolved):
        resolve_target(f"function:torch:{name}")


def test_an_object_of_the_process_is_said_to_be_one() -> None:
    graph = fx.Graph()
    graph.output(graph.call_function(lambda x: x, (graph.placeholder("x"),)))
    found = encode_graph(fx.GraphModule(nn.Module(), graph))
    (why,) = found.unsupported
    assert "<lambda>, an object that cannot be imported" in why
    assert not found.requires


@pytest.mark.parametrize("namespace", ["aten", "prims"])
def test_no_operator_that_a_dump_may_call_takes_or_gives_more_than_tensors_and_numbers(namespace: str) -> None:
    plain = {"Tensor", "int", "float", "bool", "number", "complex", "ScalarType", "Layout", "Device", "MemoryFormat"}
    words = set()
    for name in operator_names(namespace):
        if refusal_by_name(f"{namespace}.{name}") is not None:
            continue
        packet = find_op_packet(namespace, name)
        if packet is None or operator_problem(packet) is not None:
            continue
        for overload in (getattr(packet, one) for one in packet.overloads()):
            if has_dispatched(overload):
                for value in (*overload._schema.arguments, *overload._schema.returns):
                    kind = re.sub(r"Optional|List|[\[\]]", "", str(value.real_type))
                    assert kind in plain | {"str", "Generator"}, overload
                    if kind == "str":
                        words.add(value.name)
    assert not {word for word in words if re.search(r"file|path|name$|url", word)} - {"api_name"}


def test_an_index_that_is_not_checked_becomes_one_that_is() -> None:
    assert resolve_target("op:aten._unsafe_index.Tensor") is torch.ops.aten.index.Tensor
    assert resolve_target("op:aten._unsafe_index_put.default") is torch.ops.aten.index_put.default
    assert resolve_target("packet:aten._unsafe_index") is torch.ops.aten.index


def test_a_message_of_a_stranger_holds_no_code() -> None:
    text = "wrong\"); system(\"touch pwned\"); //\n''' {x} \\"
    told = decode_argument({"tuple": [{"node": "x"}, text]}, lambda kind, name: (kind, name), message=True)
    assert told == (("node", "x"), "wrong_); system(_touch pwned_); //____ _x_ _")
    with pytest.raises(BadArgument, match="no word"):
        decode_argument({"tuple": [text]}, lambda *_: 0)


# what op_db, forward and backward, and the optimizers call in torch 2.13
PRIVATE = (
    "_adaptive_avg_pool2d _adaptive_avg_pool3d_backward _amp_foreach_non_finite_check_and_unscale_ "
    "_cdist_backward _chunk_cat _conj _conj_physical _ctc_loss_backward _embedding_bag "
    "_embedding_bag_per_sample_weights_backward _fft_c2r _foreach_addcdiv_ _foreach_norm _fused_adamw_ "
    "_histogramdd_from_bin_cts _linalg_check_errors _linalg_svd _local_scalar_dense _log_softmax_backward_data "
    "_native_batch_norm_legit _native_batch_norm_legit_functional _pdist_forward _prelu_kernel_backward "
    "_safe_softmax _scaled_dot_product_efficient_attention _scaled_dot_product_flash_attention_for_cpu_backward "
    "_softmax _to_copy _trilinear _unique2 _unsafe_masked_index _unsafe_view _upsample_bilinear2d_aa_backward "
    "_weight_norm_interface_backward __and__ "
)


@pytest.mark.parametrize("name", PRIVATE.split())
def test_private_operators_that_tracing_writes_may_be_called(name: str) -> None:
    assert resolve_target(f"packet:aten.{name}") is getattr(torch.ops.aten, name)


@pytest.mark.parametrize(
    "name", ["_step_of_a_newer_torch", "_aminmax", "_to_dense", "_stack", "_cudnn_init_dropout_state"]
)
def test_private_operators_that_are_on_no_list_may_not_be_called(name: str) -> None:
    assert refusal_by_name("aten.operator_of_a_newer_torch") is None
    for target in (f"op:aten.{name}.default", f"packet:aten.{name}", f"function:torch:{name}", f"method:{name}"):
        with pytest.raises(Unresolved, match="a dump may not call this"):
            resolve_target(target)


@pytest.mark.parametrize(
    "name", ["zeros", "ones", "full", "empty", "rand", "mean", "transpose", "flatten", "log_softmax"]
)
def test_common_operators_may_be_called_under_every_name_in_every_torch(name: str) -> None:
    assert resolve_target(f"packet:aten.{name}") is getattr(torch.ops.aten, name)
    assert resolve_target(f"function:torch:{name}") is getattr(torch, name)


@pytest.mark.process
@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, 24))])
def test_nothing_that_a_dump_may_call_reaches_the_system(part: int, tmp_path: Path) -> None:
    told = told_by("reach_program.py", part, 24, folder=tmp_path)
    assert told["reached"] == {}
    assert told["called"] > 100
    assert told["worked"] > 30
    assert os.listdir(tmp_path) == []


def test_no_callable_is_a_module_or_a_class_of_torch() -> None:
    plain = {bool, complex, float, int, list, range, slice, tuple, torch.Size}
    for name, function in functions().items():
        assert not inspect.ismodule(function), name
        assert not inspect.isclass(function) or function in plain, name
