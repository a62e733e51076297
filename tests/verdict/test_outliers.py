from __future__ import annotations

import pytest
import torch

from checked_backend.verdict import elements
from checked_backend.verdict.envelope import Envelope
from checked_backend.verdict.outliers import outside_noise


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("with_float64", [False, True])
def test_how_many_blocks_a_tensor_has_does_not_matter(dtype, with_float64, monkeypatch):
    right = torch.randn(40, 25, dtype=torch.complex128 if dtype.is_complex else torch.float64) ** 3
    roundoff = torch.finfo(dtype).eps / 2

    def rounded() -> torch.Tensor:
        return (right * (1 + roundoff * torch.randn(right.shape))).to(dtype)

    reference, high_precision = rounded(), right if with_float64 else None
    noise = Envelope.of(reference, rounded())
    for wrong in (None, 0, 511, 999):
        candidate = rounded()
        if wrong is not None:
            candidate.view(-1)[wrong] += 40
        found = []
        for size in (7, 512, 1 << 20):
            monkeypatch.setattr(elements, "_BLOCK", size)
            found.append(
                outside_noise(reference=reference, candidate=candidate, envelope=noise, high_precision=high_precision)
            )
        assert found[0] == found[1] == found[2]
        assert found[0].count == (wrong is not None)


def test_an_infinity_that_float64_has_too_is_right():
    reference = torch.randn(8)
    high_precision = reference.double()
    high_precision[3] = -torch.inf  # a threshold that eager's rounding misses
    quiet = Envelope.of(reference, reference)
    for value, count in ((-torch.inf, 0), (torch.inf, 1), (torch.nan, 1), (7.0, 1)):
        candidate = reference.clone()
        candidate[3] = value
        found = outside_noise(reference=reference, candidate=candidate, envelope=quiet, high_precision=high_precision)
        assert (found.count, found.unconfirmed) == (count, count)
