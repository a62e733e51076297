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
            given = {"candidate": candidate, "envelope": noise, "high_precision": high_precision}
            found.append(outside_noise(reference=reference, **given))
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


def test_a_few_elements_may_jump_as_in_each_control_run():
    """Two numbers nearly cancel before they are divided by their own size: in each run a few elements are far off."""
    reference, scale = torch.ones(400), torch.logspace(-4, 0, 400)

    def run(jumping: torch.Tensor) -> torch.Tensor:
        moved = reference + 1e-6 * torch.randn(400)
        moved[jumping] += scale[jumping]
        return moved

    def noise(jumps: int, runs: int) -> Envelope:
        envelope = Envelope.of(reference, run(torch.randperm(300)[:jumps]))
        for _ in range(runs):
            envelope.add(reference, run(torch.randperm(300)[:jumps]))
        return envelope

    def outside(jumping: list[int], envelope: Envelope, times: float = 1.0) -> int:
        candidate = reference + (run(torch.tensor(jumping)) - reference) * times
        return outside_noise(reference=reference, candidate=candidate, envelope=envelope).count

    envelope = noise(3, runs=20)
    assert 20 < envelope.jumps < 40
    assert outside([320], envelope) == 0
    assert outside([*range(320, 330)], envelope) == 10  # more than in any run
    assert outside([320], envelope, times=20) == 1  # further than in any run
    assert outside([320], noise(3, runs=5)) == 1  # too few runs to tell
    assert noise(0, runs=20).jumps == 0
