"""Metrics of two tensors computed in fractions, and tensors of any bits to compare them on."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import strategies as st

from checked_backend.findings import Metrics
from checked_backend.numerics.bits import FORMATS, INTEGERS
from checked_backend.numerics.measure import measure

FLOATS = list(FORMATS)
COMPLEX = [torch.complex32, torch.complex64, torch.complex128]
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def kind_of(value: float) -> str:
    if math.isnan(value):
        return "nan"
    return "finite" if math.isfinite(value) else str(value)


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
        view = BITS[reference.dtype.itemsize]
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
                ulps.append(
                    abs(ordinal(left_bits[position], reference.dtype) - ordinal(right_bits[position], reference.dtype))
                )
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
        assert metrics.index is None
        assert metrics.reference_value is None
        assert metrics.candidate_value is None
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
        extremes = [0, 1, (1 << width) - 1, 1 << (width - 1), (1 << (width - 1)) - 1]
        words = st.one_of(words, st.sampled_from(extremes))
        if dtype is torch.bool:
            words = st.integers(0, 1)
    elif dtype in COMPLEX:
        half = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}[dtype]
        return draw(bit_patterns(half, 2 * count, finite))
    elif finite:
        words = st.integers(0, FORMATS[dtype].largest)
    return b"".join(
        word.to_bytes(width // 8, "little") for word in draw(st.lists(words, min_size=count, max_size=count))
    )


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
