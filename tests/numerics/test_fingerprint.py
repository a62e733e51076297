"""Checksums notice every change."""

from __future__ import annotations

import pytest
import torch

from checked_backend.numerics import bits
from checked_backend.numerics import fingerprint as module
from checked_backend.numerics.fingerprint import fingerprint, fingerprints

DTYPES = [
    torch.bool,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
]


def random(dtype: torch.dtype, count: int) -> torch.Tensor:
    return (
        torch.randint(0, 256, (count * 16,), dtype=torch.uint8)[: count * dtype.itemsize].view(dtype)
        if (dtype is not torch.bool)
        else torch.rand(count) < 0.5
    )


@pytest.fixture(params=["on the processor", "on a device"])
def way(request, monkeypatch):
    """Both checksums: a CRC, and the sums that a device adds up."""
    if request.param == "on a device":
        monkeypatch.setattr(module, "is_on_cpu", lambda _tensor: False)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_bit_that_changes_is_noticed(dtype):
    values = random(dtype, 300_001)
    before = fingerprint(values)
    for place in (0, 4095, 4096, 131_072, 300_000):
        changed = values.clone()
        view = changed.view(torch.uint8)
        view[place * dtype.itemsize] ^= 1
        assert fingerprint(changed) != before


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("count", [2, 32, 1000, 20_000, 300_000])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_what_is_negated_or_doubled_as_a_whole_is_noticed(dtype, count):
    values = torch.randn(count, generator=torch.Generator().manual_seed(count)).to(dtype)
    zeros = torch.zeros(count, dtype=dtype)
    assert len({fingerprint(values * factor) for factor in (1, -1, 2, -2, 4, 0.5)}) == 6
    assert fingerprint(zeros) != fingerprint(-zeros)
    changed = values.clone()
    changed[:2] = -changed[:2]
    assert fingerprint(changed) != fingerprint(values)


def test_order_is_noticed_and_layout_is_not():
    values = torch.randn(200, 300)
    assert fingerprint(values.flip(0)) != fingerprint(values)
    assert fingerprint(values.t()) == fingerprint(values)  # one memory
    assert fingerprint(values[:, ::2]) == fingerprint(values[:, ::2].contiguous())


def test_what_has_no_bits_has_none():
    assert fingerprint(torch.eye(3).to_sparse()) is None
    assert fingerprint(torch.empty(3, device="meta")) is None


@pytest.mark.usefixtures("way")
def test_zeros_without_memory() -> None:
    x = torch.ones(5, requires_grad=True)
    [zeros] = torch.autograd.grad(torch.sgn(x).sum(), x)
    assert fingerprint(zeros) == fingerprint(torch.zeros(5))


def test_the_stride_of_a_single_element_does_not_matter():
    for stride in (0, 1, 2):
        single = torch.tensor([7, 8, 9]).as_strided((1,), (stride,), 1)
        assert fingerprint(single) == fingerprint(torch.tensor([8]))
        assert fingerprint(single.double()) is not None


def test_many_on_a_device_have_the_sums_of_each(monkeypatch):
    tensors = [random(dtype, count) for dtype in DTYPES for count in (0, 1, 100, 131_072, 300_001)]
    tensors += [torch.randn(6, 5).t(), torch.randn(()), torch.randn(4, 6)[:, ::2], torch.eye(3).to_sparse()]
    assert fingerprints(tensors) == [fingerprint(tensor) for tensor in tensors]
    monkeypatch.setattr(module, "is_on_cpu", lambda _tensor: False)
    each = [fingerprint(tensor) for tensor in tensors]
    for slab in (1, 200_000, 1 << 22):
        monkeypatch.setattr(bits, "_SLAB", slab)
        assert fingerprints(tensors) == each
    assert fingerprints([]) == []


def test_memory_that_was_freed_is_not_read() -> None:
    freed = torch.ones(300, 300).t()[::2]
    freed.untyped_storage().resize_(0)
    assert fingerprint(freed) is None


def test_a_storage_can_still_be_resized():
    values = torch.randn(10)
    fingerprint(values)
    values.untyped_storage().resize_(0)  # as FSDP does
