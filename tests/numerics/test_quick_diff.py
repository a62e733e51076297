from __future__ import annotations

import pytest
import torch

from checked_backend.numerics import bits
from checked_backend.numerics import quick_diff as screen_module
from checked_backend.numerics.measure import measure
from checked_backend.numerics.quick_diff import QuickDiff, quick_diffs


def quick_diff(*, reference: torch.Tensor, candidate: torch.Tensor) -> QuickDiff | None:
    return quick_diffs([(reference, candidate)])[0]


def test_zeros_without_memory():
    x = torch.ones(9, requires_grad=True)
    [zeros] = torch.autograd.grad(torch.sgn(x).sum(), x)
    glance = quick_diff(reference=zeros, candidate=torch.full((9,), 2.0))
    assert (glance.max_abs_diff, glance.rmse, glance.reference_rms) == (2.0, 2.0, 0.0)


@pytest.mark.parametrize("shape", [(1,), (300, 1001), (3, 5, 7)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_says_what_measure_says(dtype, shape):
    reference = torch.randn(shape, dtype=torch.float64)
    reference.view(-1)[::3] = 0.0
    candidate = (reference + 1e-2 * torch.randn(shape, dtype=torch.float64)).to(dtype)
    reference = reference.to(dtype)
    if len(shape) == 3:  # dense, in another order
        reference, candidate = (side.permute(2, 0, 1).contiguous().permute(1, 2, 0) for side in (reference, candidate))
    glance, metrics = (
        quick_diff(reference=reference, candidate=candidate),
        measure(reference=reference, candidate=candidate),
    )
    assert glance.max_abs_diff == pytest.approx(metrics.max_abs_diff, rel=1e-6)
    assert glance.rmse == pytest.approx(metrics.rmse, rel=3e-6)
    assert glance.reference_rms == pytest.approx(metrics.reference_rms, rel=3e-6)
    same = quick_diff(reference=reference, candidate=reference.clone())
    assert (same.max_abs_diff, same.rmse) == (0.0, 0.0)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 3e38])
@pytest.mark.parametrize("sides", ["reference", "candidate", "both"])
@pytest.mark.parametrize("position", [0, 9_000])
def test_what_is_not_finite_is_left_to_measure(value, sides, position):
    reference, candidate = torch.ones(10_000), torch.ones(10_000)
    if sides != "candidate":
        reference[position] = value
    if sides != "reference":
        candidate[position] = value
    assert quick_diff(reference=reference, candidate=candidate) is None


def test_what_it_does_not_apply_to():
    x = torch.arange(10)
    assert quick_diff(reference=x, candidate=x) is None
    assert quick_diff(reference=torch.ones(0), candidate=torch.ones(0)) is None
    assert quick_diff(reference=torch.ones(2), candidate=torch.ones(2, dtype=torch.float64)) is None


@pytest.mark.parametrize("shape", [(9,), (3, 5)])
def test_expanded_tensors_are_read_within_their_memory(shape):
    """Memory beyond the one element that such a tensor has is not its own."""
    memory = torch.full((64,), float("nan"))
    memory[0] = 1.0
    glance = quick_diff(reference=memory[:1].expand(shape), candidate=torch.full(shape, 3.0))
    assert (glance.max_abs_diff, glance.rmse, glance.reference_rms) == (2.0, 2.0, 1.0)


def test_many_on_a_device_have_the_numbers_of_each(monkeypatch):
    pairs = []
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.float16):
        for shape in ((1,), (3, 5, 7), (300, 101)):
            reference = torch.randn(shape).to(dtype)
            pairs.append((reference, (reference + 1e-2 * torch.randn(shape)).to(dtype)))
    pairs += [(torch.ones(3), torch.ones(3)), (torch.ones(2), torch.tensor([1, torch.nan]))]
    pairs += [(torch.ones(2, dtype=torch.int32),) * 2, (torch.full((2,), torch.inf),) * 2]
    each = [quick_diff(reference=reference, candidate=candidate) for reference, candidate in pairs]
    monkeypatch.setattr(screen_module, "is_on_cpu", lambda _tensor: False)
    for slab in (1, 5000, 1 << 22):
        monkeypatch.setattr(bits, "_SLAB", slab)
        for one, other in zip(each, quick_diffs(pairs), strict=True):
            assert (one is None) == (other is None)
            if one is not None:
                assert other.max_abs_diff == one.max_abs_diff
                assert other.rmse == pytest.approx(one.rmse, rel=1e-5)
                assert other.reference_rms == pytest.approx(one.reference_rms, rel=1e-5)
    assert quick_diffs([]) == []
