from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import checked_backend as cb
from checked_backend.numerics.randomize import randomize, randomize_tensors

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
INTEGERS = [
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.bool,
]


def same_bits(one, other):
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_floats_are_new_and_in_the_old_range(dtype):
    x = torch.rand(50).add(1).to(dtype)
    before = x.clone()
    y = randomize(x)
    assert y.dtype is dtype
    assert same_bits(x, before)
    assert not same_bits(x, y)
    assert x.double().min() <= y.double().min()
    assert y.double().max() <= x.double().max()


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_integers_are_shuffled(dtype):
    x = torch.tensor([3, 0, 2, 0, 1, 1, 0, 2, 5, 4, 9, 8, 7, 6] * 3).to(dtype)
    y = randomize(x)
    assert y.dtype is dtype
    assert not torch.equal(x, y)
    assert sorted(x.tolist()) == sorted(y.tolist())


def test_complex():
    x = torch.complex(torch.rand(20), -torch.rand(20))
    y = randomize(x)
    assert y.dtype is torch.complex64
    assert not torch.equal(x, y)
    assert torch.equal(randomize(x), y)


def test_seed_decides_and_the_global_generator_is_left_alone():
    x, state = torch.randn(5), torch.get_rng_state()
    assert torch.equal(randomize(x, seed=3), randomize(x, seed=3))
    assert not torch.equal(randomize(x, seed=3), randomize(x, seed=4))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(("value", "low", "high"), [(0.0, 0, 1), (1.0, 0, 1), (5.0, 0, 5), (-2.0, -2, 0)])
def test_a_constant_gets_a_range(value, low, high):
    y = randomize(torch.full((100,), value))
    assert bool(((y >= low) & (y <= high)).all())
    assert y.std() > 0.1


def test_nonfinite_and_mask_numbers_stay():
    top = torch.finfo(torch.float32)
    x = torch.tensor([1.0, float("nan"), float("-inf"), 2.0, top.min, float("inf"), top.max])
    y = randomize(x)
    held = [1, 2, 4, 5, 6]
    assert torch.equal(torch.nan_to_num(x, nan=7.0)[held], torch.nan_to_num(y, nan=7.0)[held])
    assert bool((x[[0, 3]] != y[[0, 3]]).all())


def test_huge_range_does_not_overflow():
    assert bool(randomize(torch.tensor([-1.7e308, 1.7e308, 0.0], dtype=torch.float64)).isfinite().all())


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(4, 6).t(),
        lambda: torch.randn(5, 1).expand(5, 3),
        lambda: torch.randn(40)[7:31:2],
        lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        lambda: torch.randn(3, 3, requires_grad=True),
        lambda: torch.nn.Parameter(torch.randn(3)),
        lambda: torch.nn.Parameter(torch.randn(3), requires_grad=False),
        lambda: torch.randn(3, dtype=torch.complex64).conj(),
        lambda: torch.randn(3, dtype=torch.complex64).conj().imag,
        lambda: torch.randn(10).as_strided((3, 4), (2, 1), 1),
    ],
)
def test_metadata_is_kept(make):
    x = make()
    y = randomize(x)
    kept = ("shape", "dtype", "device", "requires_grad", "is_leaf")
    assert [getattr(x, name) for name in kept] == [getattr(y, name) for name in kept]
    assert (x.stride(), x.storage_offset(), x.is_conj(), x.is_neg()) == (
        y.stride(),
        y.storage_offset(),
        y.is_conj(),
        y.is_neg(),
    )
    assert type(x) is type(y)
    assert not torch.equal(x, y)


def test_memory_that_no_tensor_reads_is_not_mixed_in():
    memory = torch.full((20,), 1000)
    memory[::2] = torch.tensor([4, 1, 3, 2, 0, 9, 8, 7, 6, 5])
    assert sorted(randomize(memory[::2]).tolist()) == list(range(10))


def test_aliases_stay_aliases():
    base = torch.randn(10)
    x, view, stranger = randomize([base, base[2:6], torch.randn(3)])
    assert view.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    assert torch.equal(view, x[2:6])
    assert stranger.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.tensor(3),
        lambda: torch.tensor([0, 2, 2, 7]),
        lambda: torch.zeros(0),
        lambda: torch.randn(3, 3).to_sparse(),
        lambda: torch.full((3,), float("nan")),
        lambda: torch.randn(3, device="meta"),
        lambda: torch.quantize_per_tensor(torch.randn(3), 0.1, 0, torch.quint8),
        lambda: torch.autograd.grad(torch.sgn(x := torch.ones(4, requires_grad=True)).sum(), x)[0],
    ],
    ids=["one integer", "sorted", "empty", "sparse", "nan", "meta", "quantized", "zeros without memory"],
)
@pytest.mark.filterwarnings("ignore")
def test_what_cannot_be_varied_is_the_same_object(make):
    x = make()
    assert randomize_tensors([x])[0] is x


def test_memory_seen_in_two_dtypes_is_kept():
    x = torch.randn(4)
    bits = x.view(torch.int32)
    one, other = randomize([x, bits])
    assert one is x
    assert other is bits


def test_containers_and_other_values():
    given = {"a": [torch.randn(3), 2, None], "b": ("word", torch.randn(2))}
    out = cb.randomize(given)
    assert out["a"][1:] == [2, None]
    assert out["b"][0] == "word"
    assert not torch.equal(out["a"][0], given["a"][0])
    assert given["a"][0] is not out["a"][0]


def test_a_value_baked_into_a_trace_shows():
    x = torch.randn(8)
    traced = make_fx(lambda t: t * float(t.max()), _error_on_data_dependent_ops=False)(x)
    fresh = randomize(x)
    assert torch.equal(traced(x), x * x.max())
    assert not torch.equal(traced(fresh), fresh * fresh.max())
