from __future__ import annotations

import pytest
import torch

from checked_backend.verdict.envelope import Envelope
from checked_backend.verdict.outliers import outside_noise, twin_difference


def envelope(*values: float) -> Envelope:
    return Envelope(torch.tensor(values, dtype=torch.float64))


def double(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_subnormal_numbers_have_no_relative_difference():
    right = double(0.75, 6.5308907e-317)
    found = twin_difference(high_precision=right, twin=right + double(0, 5e-324), envelope=envelope(1e-16, 0))
    assert not found.differs
    assert not found.equal


def test_what_cancels_inside_of_a_kernel_leaves_roundings_of_its_terms():
    right, left_over = double(1.0, 2.0, 1e-16), double(0.0, 0.0, 1e-16)
    assert not twin_difference(high_precision=right, twin=right + left_over, envelope=envelope(0, 0, 0)).differs
    assert twin_difference(high_precision=right, twin=right + 1e3 * left_over, envelope=envelope(0, 0, 0)).differs


@pytest.mark.parametrize(("off", "differs"), [(0, False), (1, False), (2, True)])
def test_an_element_that_jumps_in_float64_lends_no_noise_to_others(off, differs):
    right = torch.ones(40, dtype=torch.float64)
    first, further = Envelope(torch.full((40,), 1e-16)), Envelope(torch.full((40,), 1e-15))
    further.values[:2] = 0.5
    twin = right.clone()
    twin[off] += 0.4
    found = twin_difference(high_precision=right, twin=twin, envelope=first, further=further)
    assert found.differs == differs


def test_of_many_nan_that_flip_a_few_may_flip_elsewhere():
    reference, candidate = torch.ones(100), torch.ones(100)
    unstable = torch.arange(100) < 40
    runs = [Envelope(torch.zeros(100), 3, unstable.clone()) for _ in range(2)]
    candidate[40:44] = torch.nan
    assert not outside_noise(reference=reference, candidate=candidate, envelope=runs[0], strong=runs[1])
    candidate[40:60] = torch.nan
    assert outside_noise(reference=reference, candidate=candidate, envelope=runs[0], strong=runs[1]).nonfinite == 20
