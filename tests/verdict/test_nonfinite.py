"""NaN, infinity, and the ends of a dtype's range excuse nothing elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import checked_backend as cb
from checked_backend.regions.runner import RegionRunner
from tests.support import faults
from tests.support.noise_tools import rounding_otherwise
from tests.support.region_tools import agreed, checked, found, gathered


@pytest.mark.parametrize("value", [5.0, 1e6])
def test_where_noise_makes_nan_not_everything_is_right(value: float) -> None:
    def program(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (a * a - b * b).sqrt()

    a = torch.rand(200) + 2.1
    b = a - 1
    b[7] = a[7]
    spoil = faults.spoiled_output(lambda root: torch.where(root == 0, value, root))
    assert found(gathered(lambda: checked(program, spoil)(a, b)))
    assert agreed(gathered(lambda: checked(program, faults.spoiled_output(lambda r: r.nan_to_num(0.0)))(a, b)))


def test_masks_lend_no_noise_to_other_elements() -> None:
    def program(q: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return q @ q.t() + mask

    q, mask = torch.randn(32, 16), torch.zeros(32, 32)
    mask[:, 20:] = -1e9
    off = faults.spoiled_output(lambda scores: torch.where(scores > -1e6, scores * 1.0005, scores))
    assert found(gathered(lambda: checked(program, off)(q, mask))) == {("logic", "output[0]")}
    assert agreed(gathered(lambda: checked(program, faults.spoiled_output(rounding_otherwise))(q, mask)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_infinities_and_complex_numbers_are_settled_by_known_noise(dtype: torch.dtype) -> None:
    """A mask of infinities has the noise of its finite elements; later calls and rechecks need no control runs."""

    def program(x: torch.Tensor) -> torch.Tensor:
        scores = torch.sin(x @ x) * 1.1
        return scores if dtype.is_complex else scores.masked_fill(x > 1, float("-inf"))

    model = checked(program, faults.spoiled_output(lambda r: r * (1 + 2.0**-22)))
    asked: list[int] = []
    run_once, x = RegionRunner.run, torch.randn(8, 8, dtype=dtype)

    def counted(*given: Any) -> Any:
        asked.append(1)
        return run_once(*given)

    def run() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(RegionRunner, "run", counted)
            for number in range(1, 8):
                asked.clear()
                model(x)
                assert bool(asked) == (number == 1)

    assert agreed(gathered(run))


def test_what_overflows_in_half_precision_has_no_noise_there() -> None:
    x = torch.linspace(0, 1.5, 64, dtype=torch.float16)
    assert agreed(gathered(lambda: checked(lambda x: torch.exp(x * 10), faults.clean())(x)))
    off = faults.spoiled_output(lambda e: (e.double() * 1.01).to(e.dtype))
    assert found(gathered(lambda: checked(lambda x: torch.exp(x * 10), off)(x)))


def test_nan_that_flips_may_flip_elsewhere() -> None:
    """Where a cosine rounds to more than 1, its angle is NaN: in a few places only in the candidate."""
    lengths = torch.where(torch.arange(4000) % 100 == 0, 1.0, 0.9)
    rows = torch.nn.functional.normalize(torch.randn(4000, 8), dim=1) * lengths[:, None]

    def program(x: torch.Tensor) -> torch.Tensor:
        return torch.acos((x * x).sum(1))

    backwards = faults.instead(lambda x: torch.acos((x * x).flip(1).cumsum(1)[:, -1]))
    assert agreed(gathered(lambda: checked(program, backwards)(rows)))
    off = faults.spoiled_output(lambda angle: torch.where(torch.arange(4000) % 3 == 0, torch.nan, angle))
    assert found(gathered(lambda: checked(lambda x: program(x * 0.9), off)(rows)))


@pytest.mark.parametrize("fault", ["none", "in all dtypes"])
def test_a_program_that_leaves_the_range_of_its_dtype_is_no_finding(fault: str) -> None:
    """Squares overflow: eager gives NaN, and a compiler that saturates gives numbers, wrong ones, too."""

    def program(x: torch.Tensor, largest: float = torch.inf) -> torch.Tensor:
        squares = x.square().clamp_max(largest)
        mean = (squares / x.shape[-1]).sum(-1, keepdim=True)
        return (squares - mean) / mean

    factor = 1.0 if fault == "none" else 1.01
    compiler = faults.instead(lambda x: program(x, torch.finfo(x.dtype).max) * factor)
    x = torch.randn(6, 32) * torch.tensor([1.0, 1.0, 1.0, 1e25, 1e30, 1e33])[:, None]
    report = gathered(lambda: checked(program, compiler)(x))
    if fault == "none":
        assert report.verdict is cb.Verdict.INCONCLUSIVE
        [reason] = [skip.reason for skip in report.coverage.skipped if skip.matters]
        assert "leaves the range of float32" in reason
    else:
        assert report.verdict is cb.Verdict.FAIL


@pytest.mark.parametrize("least", [-2.0, 1.0])
@pytest.mark.parametrize(("factor", "verdict"), [(1.0, cb.Verdict.PASS), (1.1, cb.Verdict.INCONCLUSIVE)])
def test_kernels_that_do_not_overflow_where_eager_does_in_half_precision(
    factor: float, verdict: cb.Verdict, least: float
) -> None:
    """As under a loss scaler: fused kernels keep float32 inside. What they give is held against float64."""

    def program(x: torch.Tensor) -> torch.Tensor:
        return (x.half() * 300).square().div(1000).float()

    @faults.runs
    def compiler(forward: Callable[..., Any], x: torch.Tensor) -> tuple[torch.Tensor]:
        right = forward(x)[0]
        if x.dtype == torch.float64:
            return (right,)
        inside = (x * 300).square().div(1000).half().float()
        return (torch.where(right.isinf(), inside * factor, right),)

    report = gathered(lambda: checked(program, compiler)(torch.linspace(least, 2, 400)))
    assert report.verdict is verdict, report
    if verdict is cb.Verdict.PASS:
        assert report.coverage.own_precision_limit["output[0]"] == pytest.approx(2**-5)  # half of float16's digits
        assert "output[0]" in report.coverage.detection_limit
    else:
        [reason] = [skip.reason for skip in report.coverage.skipped if skip.matters]
        assert "leaves the range of half precision" in reason


@pytest.mark.parametrize("spoiled", [0, 100])
def test_nan_at_the_edge_excuses_no_nan_elsewhere(spoiled: int) -> None:
    """Cosines that rounding takes beyond 1 have no angle; others are no cosines of that kind."""

    def program(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.acos((x * y).sum(-1) / (x.norm(dim=-1) * y.norm(dim=-1)))

    @faults.runs
    def otherwise(_forward: Callable[..., Any], *args: torch.Tensor) -> tuple[torch.Tensor]:
        x, y = args if args[0].dtype == torch.float64 else (arg + 0.0 for arg in args)
        angle = torch.acos((x / x.norm(dim=-1)[:, None] * (y / y.norm(dim=-1)[:, None])).sum(-1))
        angle[angle.nan_to_num(-1.0).argsort(descending=True)[:spoiled]] = torch.nan
        return (angle,)

    x = torch.randn(6000, 8)
    y = torch.where(torch.arange(6000)[:, None] < 3000, x, torch.randn(6000, 8))
    report = gathered(lambda: checked(program, otherwise)(x, y))
    assert report.verdict is (cb.Verdict.FAIL if spoiled else cb.Verdict.PASS), report


@pytest.mark.parametrize("seed", [4, 5])
def test_the_gradient_of_an_angle_of_nothing_is_nan_at_times(seed: int) -> None:
    """Where a cosine is 1, it depends on roundings, in float64 too, whether its angle has a gradient."""
    torch.manual_seed(seed)

    def angle(x: torch.Tensor, y: torch.Tensor, backwards: bool = False) -> torch.Tensor:
        products = F.normalize(x, dim=-1) * F.normalize(y, dim=-1)
        return torch.acos(products.flip(-1).cumsum(-1)[:, -1] if backwards else products.sum(-1)).mean()

    otherwise = faults.instead(lambda x, y: angle(x, y, backwards=True))
    x = torch.randn(64, 33)
    given = (x.requires_grad_(), (x.detach() * torch.rand(64, 1)).requires_grad_())
    assert cb.check(angle, given, compiler=otherwise, localize=False).verdict is not cb.Verdict.FAIL


@pytest.mark.parametrize(("dtype", "fill"), [(torch.float32, -1e9), (torch.bfloat16, "lowest")])
def test_a_masked_row_of_attention_hides_nothing(dtype: torch.dtype, fill: float | str) -> None:
    """What attention keeps for backward is as large as the mask there; a roundoff of it is none of the program's."""
    query, key, value = (torch.randn(2, 4, 10, 8, dtype=dtype, requires_grad=True) for _ in range(3))
    keep = torch.rand(2, 1, 10, 10) > 0.4
    keep[..., 0] = True
    keep[0, :, 3] = False
    mask = torch.where(keep, 0.0, torch.finfo(dtype).min if isinstance(fill, str) else fill).to(dtype)

    def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)

    otherwise = faults.spoiled_output(rounding_otherwise, how="aot")
    report = agreed(gathered(lambda: checked(attention, otherwise)(query, key, value).sum().backward()))
    assert max(report.coverage.detection_limit.values()) < (1e-5 if dtype is torch.float32 else 1e-8)
    wrong = checked(attention, faults.scaled_gradient("key", "aot"))
    assert found(gathered(lambda: wrong(query, key, value).sum().backward())) == {("logic", "grad[key]")}


@pytest.mark.parametrize("instead", [torch.nan, -torch.inf, 6e4])
def test_what_overflows_must_be_the_same_infinity(instead: float) -> None:
    """Eager's infinity is right at its precision, and so is no other."""

    def spoil(tensor: torch.Tensor) -> torch.Tensor:
        return torch.where(tensor.to(torch.float16).isinf(), instead, tensor) if tensor.dtype.itemsize == 2 else tensor

    x = torch.randn(64, dtype=torch.float16) * 500
    report = gathered(lambda: checked(lambda x: x * x, faults.spoiled_output(spoil))(x))
    assert found(report) == {("nonfinite", "output[0]")}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_only_what_processors_flush_to_zero_may_be_zero(dtype: torch.dtype) -> None:
    """Below 1e-38 a number may be lost; nobody flushes those below 6e-5 that float16 keeps with fewer bits."""

    def flush(tensor: torch.Tensor) -> torch.Tensor:
        return torch.where(tensor.abs() < torch.finfo(dtype).tiny, 0.0, tensor) if tensor.dtype is dtype else tensor

    x = (torch.randn(400) * torch.finfo(dtype).tiny / 2).to(dtype)
    report = gathered(lambda: checked(lambda x: x * 0.7, faults.spoiled_output(flush))(x))
    assert report.verdict is (cb.Verdict.FAIL if dtype is torch.float16 else cb.Verdict.PASS), report
