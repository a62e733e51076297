"""Whatever lies behind an input comes back: dtype, sizes, strides, offset, shared memory, values."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import fx, nn

import checked_backend as cb
from tests.support.dump_tools import as_bytes, dumping, dumps, observed, same_leaf

DTYPES = [
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e5m2, torch.float8_e4m3fn),
    *(torch.complex64, torch.complex128, torch.int64, torch.int16, torch.uint16, torch.uint8, torch.bool),
]


def dump_inputs(args: list[Any], folder: Path, *, values: bool) -> cb.Dump:
    graph = fx.Graph()
    nodes = []
    for position, arg in enumerate(args):
        node = graph.placeholder(f"arg{position}")
        node.meta["val"] = arg
        nodes.append(node)
    graph.output(tuple(nodes))
    return observed("inference", fx.GraphModule(nn.Module(), graph), args, folder, values=values)


@st.composite
def arguments(draw: st.DrawFn) -> list[torch.Tensor]:
    """Views into a few storages."""
    seed = draw(st.integers(0, 1000))
    generator = torch.Generator().manual_seed(seed)
    storages = [
        torch.randint(0, 256, (draw(st.sampled_from([256, 4096])),), dtype=torch.uint8, generator=generator)
        for _ in range(draw(st.integers(1, 3)))
    ]
    made = []
    for _ in range(draw(st.integers(1, 5))):
        base = draw(st.sampled_from(storages))
        dtype = draw(st.sampled_from(DTYPES))
        shape = draw(st.lists(st.integers(0, 4), max_size=3))
        room = base.numel() // dtype.itemsize
        stride = [draw(st.integers(0, max(0, min(9, room // 16)))) for _ in shape]
        span = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True) if size)
        offset = draw(st.integers(0, room - span))
        if dtype is torch.bool:
            base = base.clone().remainder_(2)
        view = torch.empty(0, dtype=dtype).set_(base.untyped_storage(), offset, tuple(shape), tuple(stride))
        if dtype.is_floating_point and dtype.itemsize > 1 and draw(st.booleans()):
            view = view.requires_grad_()
        if dtype.is_complex and draw(st.booleans()):
            view = view.conj()
        made.append(view)
    return made


def describe(tensor: torch.Tensor) -> tuple[Any, ...]:
    layout = (tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.storage_offset())
    return (*layout, tensor.requires_grad, tensor.is_conj(), tensor.is_neg(), tensor.device)


def shared(tensors: list[torch.Tensor]) -> list[list[bool]]:
    keys = [tensor.untyped_storage().data_ptr() for tensor in tensors]
    return [[one == other for other in keys] for one in keys]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(args=arguments(), values=st.booleans())
def test_metadata_and_values_round_trip(args: list[torch.Tensor], values: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        dump = dump_inputs(args, Path(folder), values=values)
        rebuilt = dump.inputs()
        assert [describe(arg) for arg in args] == [describe(arg) for arg in rebuilt]
        filled = [at for at, arg in enumerate(args) if arg.numel()]  # empty storages have no address of their own
        assert shared([args[at] for at in filled]) == shared([rebuilt[at] for at in filled])
        if values:
            assert [as_bytes(arg.detach()) for arg in args] == [as_bytes(arg.detach()) for arg in rebuilt]
        again = dump.inputs()
        assert all(map(same_leaf, rebuilt, again))
        untouched = [as_bytes(arg.detach()) for arg in again]
        for arg in rebuilt:
            arg.untyped_storage().fill_(0)
        assert untouched == [as_bytes(arg.detach()) for arg in dump.inputs()]


@settings(max_examples=40, deadline=None)
@given(
    low=st.integers(-(2**40), 2**40),
    width=st.integers(0, 2**20),
    seed=st.integers(0, 5),
    dtype=st.sampled_from([torch.int64, torch.float64]),
)
def test_made_values_stay_within_the_recorded_range(low: int, width: int, seed: int, dtype: torch.dtype) -> None:
    recorded = torch.tensor([low, low + width, low], dtype=dtype)
    with tempfile.TemporaryDirectory() as folder:
        (made,) = dump_inputs([recorded], Path(folder), values=False).inputs(seed)
    assert low <= made.min().item() <= made.max().item() <= low + width


def test_seeds_give_other_values_and_the_same_again(tmp_path: Path) -> None:
    dump = dump_inputs([torch.randn(50)], tmp_path, values=False)
    assert torch.equal(dump.inputs(3)[0], dump.inputs(3)[0])
    assert not torch.equal(dump.inputs(3)[0], dump.inputs(4)[0])


def test_an_index_stays_in_bounds(tmp_path: Path) -> None:
    table, index = torch.randn(5, 3), torch.tensor([4, 0, 2])
    dumping(lambda table, index: nn.functional.embedding(index, table), tmp_path, values=False)(table, index)
    for path in dumps(tmp_path).values():
        dump = cb.load_dump(path)
        for seed in range(5):
            assert dump.module(*dump.inputs(seed))[0].shape == (3, 3)


def test_scalars_and_unknown_values(tmp_path: Path) -> None:
    args = [3, True, 0.1, float("inf"), None, torch.ones(2)]
    assert dump_inputs(args, tmp_path / "a", values=True).inputs()[:-1] == args[:-1]
    dump = dump_inputs([torch.ones(2), torch.eye(2).to_sparse()], tmp_path / "b", values=True)
    with pytest.raises(cb.DumpError, match=r"inputs\.json.*arg1 is a tensor of layout torch\.sparse_coo"):
        dump.inputs()


def test_parameters_and_results_of_operators_keep_their_place_in_autograd(tmp_path: Path) -> None:
    parameter = nn.Parameter(torch.randn(3))
    result = torch.randn(3, requires_grad=True) * 2
    first, second = dump_inputs([parameter, result], tmp_path, values=True).inputs()
    assert isinstance(first, nn.Parameter)
    assert first.is_leaf
    assert second.requires_grad
    assert not second.is_leaf
    second.mul_(2)  # which autograd forbids on a leaf
    assert torch.equal(second, result * 2)


@pytest.mark.parametrize("kind", ["random", "autocast", "inference"])
def test_random_state_and_modes_are_those_of_the_call(kind: str, tmp_path: Path) -> None:
    x = torch.randn(6, 6)
    compiled = dumping(lambda x: nn.functional.dropout(x @ x, 0.5), tmp_path)
    modes = {"random": torch.no_grad(), "autocast": torch.autocast("cpu"), "inference": torch.inference_mode()}
    torch.manual_seed(17)
    torch.rand(5)
    with modes[kind]:
        expected = compiled(x)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    for path in dumps(tmp_path).values():
        dump = cb.load_dump(path)
        with dump.ambient():
            assert torch.is_inference_mode_enabled() == (kind == "inference")
            actual = dump.module(*dump.inputs())
        assert same_leaf(expected, actual[0])
    assert torch.equal(torch.get_rng_state(), before)


def test_symbols_and_how_they_relate(tmp_path: Path) -> None:
    def join(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, y]).reshape(2, -1)

    dumping(join, tmp_path, values=False, dynamic=True)(torch.randn(6), torch.randn(8))
    data = cb.load_dump(dumps(tmp_path)["join_dynamo_0"]).metadata
    hints = {name: symbol["hint"] for name, symbol in data["symbols"].items()}
    assert sorted(hints.values()) == [6, 8]
    first, second = sorted(hints)
    assert data["relations"] == [f"Eq(Mod({first} + {second}, 2), 0)"]
    shapes = [entry["tensor"]["symbolic"]["shape"] for entry in data["inputs"]["inputs"] if entry["tensor"]]
    assert sorted(hints) == sorted(shape[0] for shape in shapes)
