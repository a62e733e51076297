from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from checked_backend.findings import Metrics
from checked_backend.numerics.bits import FORMATS, INTEGERS
from checked_backend.numerics.measure import UnsupportedTensorError, measure

FLOATS = list(FORMATS)
COMPLEX = [torch.complex32, torch.complex64, torch.complex128]


def kind_of(value: float) -> str:
    return "finite" if math.isfinite(value) else "nan" if math.isnan(value) else str(value)


def parts(value):
    return (value.real, value.imag) if isinstance(value, complex) else (value,)


def as_float(value: Fraction) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf


def root_mean(squares: list[Fraction]) -> float:
    if not squares:
        return 0.0
    mean = sum(squares, Fraction(0)) / len(squares)
    if mean == 0:
        return 0.0
    shift = (mean.denominator.bit_length() - mean.numerator.bit_length()) // 2 * 2
    try:
        return math.ldexp(math.sqrt(mean * Fraction(2) ** shift), -shift // 2)
    except OverflowError:
        return math.inf


def ordinal(bits: int, dtype: torch.dtype) -> int:
    width = 8 * dtype.itemsize
    bits %= 1 << width
    if not FORMATS[dtype].signed:
        return bits
    magnitude = bits % (1 << (width - 1))
    return -magnitude if bits >> (width - 1) else magnitude


def oracle(reference: torch.Tensor, candidate: torch.Tensor) -> dict:
    """The metrics by exact rational arithmetic, element by element."""
    left, right = reference.reshape(-1).tolist(), candidate.reshape(-1).tolist()
    squares, reference_squares, differences, ratios, ulps = [], [], [0.0], [0.0], [0]
    mismatched = classes = 0
    is_float = reference.dtype in FORMATS
    if is_float:
        view = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[reference.dtype.itemsize]
        left_bits = reference.reshape(-1).clone().view(view).tolist()
        right_bits = candidate.reshape(-1).clone().view(view).tolist()
    counts = {"nan": [0, 0], "inf": [0, 0]}
    for position, (x, y) in enumerate(zip(left, right, strict=True)):
        kinds = [[kind_of(part) for part in parts(value)] for value in (x, y)]
        for side in (0, 1):
            if "nan" in kinds[side]:
                counts["nan"][side] += 1
            elif set(kinds[side]) != {"finite"}:
                counts["inf"][side] += 1
        classes += kinds[0] != kinds[1]
        mismatched += kinds[0] != kinds[1]
        if kinds[0] == kinds[1] and "finite" in kinds[0] and set(kinds[0]) & {"inf", "-inf"}:
            mismatched += x != y
        if set(kinds[0]) == {"finite"}:
            reference_squares.append(sum(Fraction(part) ** 2 for part in parts(x)))
        if set(kinds[0]) == set(kinds[1]) == {"finite"}:
            exact = [Fraction(a) - Fraction(b) for a, b in zip(parts(y), parts(x), strict=True)]
            square = sum(part**2 for part in exact)
            squares.append(square)
            if square:
                mismatched += 1
                difference = as_float(abs(exact[0])) if len(exact) == 1 else root_mean([square])
                differences.append(difference)
                size = sum(Fraction(part) ** 2 for part in parts(x))
                ratios.append(difference / root_mean([size]) if size else math.inf)
            if is_float:
                ordinals = (ordinal(bits[position], reference.dtype) for bits in (left_bits, right_bits))
                ulps.append(abs(next(ordinals) - next(ordinals)))
    return {
        "total": len(left),
        "mismatched": mismatched,
        "max_abs_diff": max(differences),
        "max_rel_diff": max(ratios),
        "max_ulp": max(ulps) if is_float else None,
        "rmse": root_mean(squares),
        "reference_rms": root_mean(reference_squares),
        "reference_max": max([0.0, *(root_mean([square]) for square in reference_squares)]),
        "nonfinite_mismatched": classes,
        "nan_reference": counts["nan"][0],
        "nan_candidate": counts["nan"][1],
        "inf_reference": counts["inf"][0],
        "inf_candidate": counts["inf"][1],
    }


def check(reference: torch.Tensor, candidate: torch.Tensor, block_size: int | None = None) -> Metrics:
    """Measure, and hold the metrics against exact arithmetic."""
    before = reference.clone(), candidate.clone()
    metrics = measure(reference=reference, candidate=candidate, _block_size=block_size)
    expected = oracle(reference, candidate)
    overflow = math.inf in (expected["max_abs_diff"], expected["reference_max"])
    for name, value in expected.items():
        got = getattr(metrics, name)
        if overflow and name in ("max_rel_diff", "rmse", "reference_rms"):
            continue
        if isinstance(value, float) and math.isfinite(value):
            assert got == pytest.approx(value, rel=4e-15, abs=1e-322), name
        else:
            assert got == value, name
    if reference.dtype in INTEGERS:
        assert metrics.max_abs_diff == expected["max_abs_diff"]
    check_index(metrics, reference, candidate)
    for tensor, old in zip((reference, candidate), before, strict=True):
        assert torch.equal(raw(tensor), raw(old))
    return metrics


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def check_index(metrics: Metrics, reference: torch.Tensor, candidate: torch.Tensor) -> None:
    if metrics.mismatched == 0:
        assert (metrics.index, metrics.reference_value, metrics.candidate_value) == (None, None, None)
        return
    assert metrics.index is not None
    x, y = reference[metrics.index].item(), candidate[metrics.index].item()
    assert repr(metrics.reference_value) == repr(x)
    assert repr(metrics.candidate_value) == repr(y)
    kinds = [[kind_of(part) for part in parts(value)] for value in (x, y)]
    if metrics.nonfinite_mismatched:
        assert kinds[0] != kinds[1]
        return
    if metrics.max_abs_diff == 0 and any(kind != "finite" for kind in kinds[0]):
        assert reference.is_complex()  # nothing differs but finite parts beside infinite ones
        assert parts(x) != parts(y)
        return
    gap = [Fraction(a) - Fraction(b) for a, b in zip(parts(y), parts(x), strict=True)]
    difference = as_float(abs(gap[0])) if len(gap) == 1 else root_mean([sum(part**2 for part in gap)])
    assert metrics.max_abs_diff == pytest.approx(difference, rel=4e-15, abs=1e-322)


@st.composite
def bit_patterns(draw, dtype: torch.dtype, count: int, finite: bool):
    """Bytes of ``count`` elements: denormals, NaNs and infinities as often as the format has them, and more."""
    width = 8 * dtype.itemsize
    words = st.integers(0, (1 << width) - 1)
    if dtype in FORMATS and FORMATS[dtype].signed:
        largest = FORMATS[dtype].largest
        interesting = [0, 1, 2, largest, largest - 1, *(1 << k for k in range(0, width - 1, 3))]
        if not finite:
            interesting += [largest + 1, (1 << (width - 1)) - 1]
        signs = st.sampled_from([0, 1 << (width - 1)])
        magnitudes = st.one_of(
            st.integers(0, largest if finite else (1 << (width - 1)) - 1), st.sampled_from(interesting)
        )
        words = st.builds(lambda sign, magnitude: sign | magnitude % (1 << (width - 1)), signs, magnitudes)
        if finite and dtype in (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz):
            words = words.filter(lambda word: word != 0x80)
    elif dtype in INTEGERS:
        words = st.one_of(words, st.sampled_from([0, 1, (1 << width) - 1, 1 << (width - 1), (1 << (width - 1)) - 1]))
        if dtype is torch.bool:
            words = st.integers(0, 1)
    elif dtype in COMPLEX:
        half = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}[dtype]
        return draw(bit_patterns(half, 2 * count, finite))
    elif finite:
        words = st.integers(0, FORMATS[dtype].largest)
    drawn = draw(st.lists(words, min_size=count, max_size=count))
    return b"".join(word.to_bytes(width // 8, "little") for word in drawn)


def from_bytes(data: bytes, dtype: torch.dtype) -> torch.Tensor:
    if not data:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype)


@st.composite
def pairs(draw, dtypes=(*FLOATS, *INTEGERS, *COMPLEX)):
    dtype = draw(st.sampled_from(dtypes))
    count = draw(st.integers(0, 24))
    finite = draw(st.booleans())
    reference = from_bytes(draw(bit_patterns(dtype, count, finite)), dtype)
    candidate = from_bytes(draw(bit_patterns(dtype, count, finite)), dtype)
    for position in draw(st.lists(st.integers(0, max(0, count - 1)), max_size=count)) if count else ():
        candidate[position] = reference[position]
    return reference, candidate


pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


@pytest.mark.more
@settings(max_examples=150, deadline=None)
@given(pairs(), st.sampled_from([1, 2, 3, 7, 100, None]))
def test_any_bits(tensors, block_size):
    check(*tensors, block_size)


@pytest.mark.more
@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.int32]),
    st.integers(0, 2**32 - 1),
    st.floats(-250, 250),
    st.sampled_from([1e-16, 1e-7, 1e-3, 1.0, 1e4]),
    st.booleans(),
    st.sampled_from([5, 64, None]),
)
def test_noise_at_any_scale(dtype, seed, exponent, noise, relative, block_size):
    rng = np.random.default_rng(seed)
    limit = {torch.float64: 250.0, torch.int32: 6.0, torch.float16: 3.0, torch.complex64: 30.0}.get(dtype, 30.0)
    scale = 10.0 ** max(-limit, min(limit, exponent))
    x = rng.standard_normal(200) * scale
    x[::17] = 0.0
    y = x + noise * rng.standard_normal(200) * (x if relative else scale)
    check(torch.from_numpy(x).to(dtype), torch.from_numpy(y).to(dtype), block_size)


def views(base: torch.Tensor) -> dict[str, torch.Tensor]:
    """Tensors of shape (4, 6, 5) in different layouts with the same logical values."""
    layouts = {"contiguous": base.contiguous()}
    for order in ((0, 2, 1), (2, 1, 0), (1, 2, 0), (1, 0, 2)):
        inverse = [order.index(dim) for dim in range(3)]
        layouts[f"permuted {order}"] = base.permute(order).contiguous().permute(inverse)
    wide = torch.zeros(4, 12, 7, dtype=base.dtype)
    wide[:, ::2, 1:6] = base
    layouts["offset and steps"] = wide[:, ::2, 1:6]
    return layouts


@pytest.mark.parametrize(
    ("dtype", "block_size"),
    [
        (torch.float32, 7),
        (torch.bfloat16, 4),
        (torch.float64, 31),
        (torch.int64, 1),
        (torch.complex64, 30),
        (torch.float32, None),
    ],
)
def test_layouts(dtype, block_size):
    reference = (torch.randn(4, 6, 5, dtype=torch.float64) * 50).to(dtype)
    candidate = reference.clone()
    candidate[2, 3, 4] += 7
    candidate[1, 5, 0] -= 3
    lefts, rights = [*views(reference).values()], [*views(candidate).values()]
    for left, right in [*zip(lefts, rights, strict=True), *zip(lefts, rights[1:], strict=False)]:
        assert check(left, right, block_size).index == (2, 3, 4)
    if dtype.is_floating_point:
        candidate[3, 0, 1] = math.nan
        for left, right in zip(lefts, reversed(views(candidate).values()), strict=True):
            assert check(left, right, block_size).index == (3, 0, 1)


@pytest.mark.parametrize("block_size", [1, 5, 16, None])
def test_expanded_elements_count_as_often_as_they_occur(block_size):
    row = torch.tensor([1.0, 2.0, 4.0])
    other = torch.tensor([1.0, 2.5, 4.0])
    metrics = check(row.expand(5, 2, 3), other.expand(5, 2, 3), block_size)
    assert (metrics.total, metrics.mismatched) == (30, 10)
    check(row.expand(5, 2, 3), other.expand(5, 2, 3).contiguous(), block_size)
    check(row.view(3, 1).expand(3, 8), other.view(3, 1).expand(3, 8).contiguous(), block_size)
    check(torch.tensor(1.0).expand(4, 4), torch.eye(4), block_size)


def test_empty_and_zero_dimensional():
    for shape in ((0,), (3, 0, 2)):
        metrics = measure(reference=torch.zeros(shape), candidate=torch.ones(shape))
        assert (metrics.total, metrics.mismatched, metrics.max_ulp, metrics.index) == (0, 0, 0, None)
    metrics = check(torch.tensor(2.0), torch.tensor(3.0))
    assert metrics.index == ()
    assert metrics.max_rel_diff == 0.5


def test_conjugate_and_negative_views():
    x = torch.randn(50, dtype=torch.complex64)
    y = torch.randn(50, dtype=torch.complex64)
    assert check(x.conj(), x.conj().clone(), 7).bitwise_equal
    check(x.conj(), y, 7)
    check(x.conj().imag, y.imag, 7)
    check(x.imag, y.conj().imag, None)
    assert x.conj().imag.is_neg()


@pytest.mark.parametrize("count", [5, 1 << 17])
def test_zeros_without_memory(count):
    """What torch keeps as zeros without memory (the gradient of ``sgn``) is read as zeros."""
    x = torch.ones(count, requires_grad=True)
    [zeros] = torch.autograd.grad(torch.sgn(x).sum(), x)
    other = torch.zeros(count)
    other[3] = 2.0
    assert measure(reference=zeros, candidate=torch.zeros(count)).bitwise_equal
    for reference, candidate in ((zeros, other), (other, zeros)):
        metrics = measure(reference=reference, candidate=candidate)
        assert (metrics.mismatched, metrics.max_abs_diff, metrics.index) == (1, 2.0, (3,))
    with pytest.raises(RuntimeError):
        zeros.numpy()  # it has no memory


def test_signed_zero_nan_and_infinity_are_equal_to_themselves():
    x = torch.tensor([0.0, -0.0, math.nan, math.inf, -math.inf, 1.0])
    metrics = check(x, torch.tensor([-0.0, 0.0, -math.nan, math.inf, -math.inf, 1.0]))
    assert metrics.bitwise_equal
    assert (metrics.nan_reference, metrics.inf_candidate, metrics.max_ulp) == (1, 2, 0)
    assert metrics.reference_rms == pytest.approx(math.sqrt(1 / 3))
    assert check(x, x.flip(0)).nonfinite_mismatched > 0


def test_masks_of_infinities():
    x = torch.full((3, 70000), -math.inf).triu(1) + torch.randn(3, 70000)
    y = x + 1e-6
    metrics = measure(reference=x, candidate=y)
    assert metrics.nonfinite_mismatched == 0
    assert metrics.inf_reference == metrics.inf_candidate == int(x.isinf().sum())
    finite = x.isfinite()
    assert metrics.max_abs_diff == (y.double() - x.double())[finite].abs().max().item()


@pytest.mark.parametrize(
    ("dtype", "values", "difference"),
    [
        (torch.int64, (-(2**63), 2**63 - 1), 2**64 - 1),
        (torch.int64, (2**62 + 1, 2**62), 1),
        (torch.uint64, (0, 2**64 - 1), 2**64 - 1),
        (torch.uint32, (2**32 - 1, 0), 2**32 - 1),
        (torch.int8, (-128, 127), 255),
        (torch.bool, (True, False), 1),
    ],
)
def test_integer_extremes_do_not_wrap(dtype, values, difference):
    metrics = check(torch.tensor(values[:1], dtype=dtype), torch.tensor(values[1:], dtype=dtype))
    assert (metrics.max_abs_diff, metrics.mismatched) == (float(difference), 1)


def test_greatest_of_integers_beyond_float64_precision():
    x = torch.zeros(5, dtype=torch.int64)
    assert check(x, torch.tensor([2**62, 2**62 + 1, 2**62 + 3, 2**62 + 2, 1]), 3).index == (2,)


@pytest.mark.parametrize("kind", ["relative", "additive", "one ulp", "relu", "equal", "sign flips"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_large_tensors_against_numpy(dtype, kind):
    torch.manual_seed(1)
    size = 300_001
    x = torch.randn(size, dtype=torch.float64)
    x = x.relu() if kind == "relu" else x
    x = x.to(dtype)
    noise = torch.randn(size, dtype=torch.float64) * torch.finfo(dtype).eps * 3
    wide = {"additive": x + noise, "equal": x, "sign flips": torch.where(noise > 1e-3, -x, x) + noise}
    y = wide[kind].to(dtype) if kind in wide else (x * (1 + noise)).to(dtype)
    if kind == "one ulp":
        y = torch.where(x == 0, x, (x.view(FORMATS[dtype].bits) + 1).view(dtype))
    metrics = measure(reference=x, candidate=y)
    a, b = x.double().numpy(), y.double().numpy()
    difference = np.abs(b - a)
    assert metrics.mismatched == np.count_nonzero(a != b)
    assert metrics.max_abs_diff == difference.max()
    with np.errstate(all="ignore"):
        ratio = np.nan_to_num(difference / np.abs(a), nan=0.0, posinf=math.inf).max()
    assert metrics.max_rel_diff == pytest.approx(ratio, rel=1e-6)
    assert metrics.rmse == pytest.approx(np.sqrt(np.mean(difference**2)), rel=1e-12)
    assert metrics.reference_rms == pytest.approx(np.sqrt(np.mean(a**2)), rel=1e-12)
    assert metrics.reference_max == np.abs(a).max()
    lowest = torch.iinfo(FORMATS[dtype].bits).min
    bits = [side.view(FORMATS[dtype].bits).to(torch.int64) for side in (x, y)]
    ordered = [torch.where(side < 0, lowest - side, side).numpy().astype(object) for side in bits]
    assert metrics.max_ulp == int(max(abs(ordered[0] - ordered[1])))
    if kind == "equal":
        assert metrics.bitwise_equal
    else:
        assert difference[metrics.index] == difference.max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("position", [0, 150_000, 299_999])
def test_one_nan_in_a_large_tensor(dtype, position):
    x = torch.ones(300_000, dtype=dtype)
    y = x.clone()
    y[position] = torch.nan
    metrics = measure(reference=x, candidate=y)
    assert (metrics.mismatched, metrics.nonfinite_mismatched, metrics.nan_candidate) == (1, 1, 1)
    assert metrics.index == (position,)
    same = measure(reference=y, candidate=y.clone())
    assert (same.mismatched, same.nan_reference, same.nan_candidate) == (0, 1, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1e-38, 1e-30, 1e-20, 1e20, 1e37])
def test_squares_neither_overflow_nor_underflow(dtype, scale):
    scale = scale if dtype is torch.float32 else math.copysign(1.0, scale) * scale**8
    x = (torch.rand(200_000, dtype=torch.float64) * scale).to(dtype)
    y = (x.double() * 1.5).to(dtype)
    metrics = measure(reference=x, candidate=y)
    a, b = (side.double().numpy().astype(np.longdouble) for side in (x, y))
    assert metrics.rmse == pytest.approx(float(np.sqrt(np.mean((a - b) ** 2))), rel=1e-12)
    assert metrics.reference_rms == pytest.approx(float(np.sqrt(np.mean(a**2))), rel=1e-12)


@pytest.mark.parametrize("size", [1e-300, 1.0, 1e300])
def test_means_of_squares_stay_in_range(size):
    reference = torch.tensor([0.0, 3.0, 1e-8, 4.0, 0.0], dtype=torch.float64) * size
    for block_size in (1, 2, None):
        metrics = measure(reference=reference, candidate=torch.zeros_like(reference), _block_size=block_size)
        assert metrics.rmse == metrics.reference_rms == pytest.approx(5**0.5 * size)


def test_structure_must_agree():
    with pytest.raises(ValueError, match="differ in shape"):
        measure(reference=torch.zeros(2), candidate=torch.zeros(3))
    with pytest.raises(ValueError, match="differ in dtype"):
        measure(reference=torch.zeros(2), candidate=torch.zeros(2, dtype=torch.float64))


class Tagged(torch.Tensor):
    pass


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (torch.eye(3).to_sparse(), "layout is torch.sparse_coo"),
        (torch.zeros(3, device="meta"), "meta device"),
        (torch.zeros(3).as_subclass(Tagged), "Tagged"),
        (torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2), "no arithmetic"),
    ],
)
def test_unsupported(tensor, reason):
    with pytest.raises(UnsupportedTensorError, match=reason):
        measure(reference=tensor, candidate=tensor)
    with pytest.raises(UnsupportedTensorError, match="candidate"):
        measure(reference=torch.zeros(3), candidate=tensor)


def test_wrapped_by_a_transform_is_unsupported():
    def inside(x):
        with pytest.raises(UnsupportedTensorError, match="functorch"):
            measure(reference=x, candidate=x)
        return x

    torch.func.vmap(inside)(torch.zeros(3, 2))


def test_modes_do_not_matter_and_stay():
    x = torch.randn(100, requires_grad=True)
    y = torch.nn.Parameter(x.detach() + 1e-6)
    expected = measure(reference=x.detach(), candidate=y.detach())
    torch.set_default_dtype(torch.float64)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.device("meta"), torch.inference_mode():
        assert measure(reference=x, candidate=y) == expected
        assert torch.is_autocast_enabled("cpu")
    torch.set_default_dtype(torch.float32)
    assert torch.is_grad_enabled()
    assert measure(reference=x, candidate=y) == expected


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS, *COMPLEX])
def test_cuda_agrees_with_the_cpu(dtype):
    x = (torch.randn(1000) * 20).abs().to(dtype)
    y = x.clone()
    y[::7] = x[1]
    on_cpu = measure(reference=x, candidate=y, _block_size=64)
    on_device = measure(reference=x.cuda(), candidate=y.cuda(), _block_size=64)
    assert (on_device.mismatched, on_device.max_abs_diff) == (on_cpu.mismatched, on_cpu.max_abs_diff)
    assert on_device.max_ulp == on_cpu.max_ulp
    assert on_device.rmse == pytest.approx(on_cpu.rmse, rel=1e-12)


def test_index_prefers_another_class_to_a_difference_to_a_finite_part_beside_an_infinity():
    inf = math.inf
    x = torch.tensor([1.0, complex(inf, 1), 2.0, 3.0])
    assert check(x, torch.tensor([1.0, complex(inf, 2), 2.0, 3.0])).index == (1,)
    assert check(x, torch.tensor([1.0, complex(inf, 2), 2.5, 3.0])).index == (2,)
    assert check(x, torch.tensor([1.0, complex(inf, 2), 2.5, complex(3.0, inf)])).index == (3,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("places", "greatest"),
    [
        ({70_000: (0.0, 1.0)}, math.inf),  # the reference is 0: infinite in any precision
        ({70_000: (1e-30, 1e20)}, 1e50),  # beyond float32, not beyond float64
        ({70_000: (1e-30, 1e20), 70_001: (0.0, 1e-3)}, math.inf),
        ({70_001: (1e-30, 1e20), 70_000: (1e-30, 1e10), 200_000: (1e-30, -1e20)}, 1e50),
    ],
)
def test_greatest_ratio_beyond_float32(dtype, places, greatest):
    x = torch.ones(300_000, dtype=dtype)
    y = x * 1.01
    for place, (reference, candidate) in places.items():
        x[place], y[place] = reference, candidate
    metrics = measure(reference=x, candidate=y)
    assert metrics.max_rel_diff == pytest.approx(greatest, rel=2e-2)
    assert metrics.mismatched == 300_000
