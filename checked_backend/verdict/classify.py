"""The kind and the message of a finding about wrong values. The message claims no more than the evidence shows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from checked_backend.findings import Kind
from checked_backend.numerics.bits import is_floating
from checked_backend.verdict import thresholds
from checked_backend.verdict.elements import root_mean_square, widened
from checked_backend.verdict.evidence import Evidence

_COARSEST = torch.finfo(torch.bfloat16).eps
"""No program rounds more coarsely than to bfloat16, so a greater difference is not one of precision."""


class Classification(NamedTuple):
    """The kind and the message of a finding."""

    kind: Kind
    detail: str
    message: str


def _plain(kind: Kind, message: str) -> Classification:
    return Classification(kind, str(kind), message)


NONDETERMINISTIC = _plain(
    Kind.NONDETERMINISTIC,
    "eager does not repeat itself from the same inputs and random state, so there is nothing to compare with "
    "(uninitialised memory, or an operator without a fixed order of summation)",
)
READS_JUNK = _plain(
    Kind.NONDETERMINISTIC,
    "eager, left as it is, repeats itself bit for bit, but with other junk in uninitialised memory it does not: so it "
    "reads memory that nothing wrote, and there is nothing to compare with",
)
CHANGES_IN_FLOAT64 = _plain(
    Kind.NONDETERMINISTIC,
    "eager in float64 does not repeat itself, from the same inputs and random state, and at its own precision its "
    "noise would hide any error, so there is nothing to compare with",
)
NOT_REPRODUCED = Classification(
    Kind.LOGIC,
    "logic.this_call",
    "not reproduced: possibly hardware. It is wrong in this call only: run again from the same inputs and random "
    "numbers, the compiled program does not give this again. If it keeps no state of its own from call to call (a "
    "counter, a cache, a buffer), and nothing else writes to its tensors meanwhile (another thread, or `.data` between "
    "forward and backward), test this machine's memory and processor",
)
OTHERWISE_WHEN_TRACED = _plain(
    Kind.LOGIC,
    "further from eager than any rounding: torch computes it otherwise under a dispatch mode, and compilers trace "
    "under one",
)
UNSUPPORTED = _plain(Kind.UNSUPPORTED, "differs from eager, and no control could run to tell noise from error")


def singular(count: int) -> str:
    """Why a tensor stays undecided if some of its elements differ where float64 has no number."""
    return (
        f"{count} of its elements differ from eager by more than noise, but there float64 has NaN or infinity where "
        "eager has numbers, so nothing tells who is wrong; the program is singular there, or leaves the range of "
        "float64"
    )


def written_between(names: Sequence[str]) -> str:
    """Why nothing can be compared with eager after a write to inputs."""
    return (
        f"the program wrote to {', '.join(names)} between its forward and its backward pass, so eager cannot be run "
        "again as it was, and nothing tells noise from error"
    )


def classify(case: Evidence) -> Classification:
    """Classify a tensor that neither noise nor anything else explains."""
    if case.not_reproduced and not case.logic_differs:
        return NOT_REPRODUCED
    if case.outside.nonfinite:
        high = "eager and float64 have" if case.high_precision is not None else "eager has"
        return _plain(Kind.NONFINITE, f"NaN or infinity where {high} none, or the reverse")
    if case.logic_differs and case.same_bits:
        return _plain(
            Kind.LOGIC,
            "compiled in float64 it computes something else than eager in float64; with these inputs rounding to "
            f"{_name(case)} hides that bit for bit, with others it will not",
        )
    if case.pair.kind is not None:
        return Classification(case.pair.kind, case.pair.detail, "its values are wrong, beyond any rounding")
    if case.logic_differs:
        hidden = "" if case.outside else f"; the noise of {_name(case)} hides how wrong"
        return _plain(Kind.LOGIC, f"wrong also when compiled in float64, so this is no rounding error{hidden}")
    if case.logic_differs is False and case.right_recompiled:
        return Classification(
            Kind.LOGIC,
            "logic.this_compilation",
            "wrong as it was compiled in this program only: the same region compiled by itself, from the same inputs, "
            "is right, at its own precision and in float64; what a program holds (parameters, buffers, caches) may be "
            "compiled otherwise there, or be out of date",
        )
    if case.outside.digits and case.outside.digits == case.outside.count:
        return _plain(
            Kind.PRECISION,
            f"{case.outside.digits} of its smaller elements have lost their digits, and neither eager's nor this "
            "program's rounding does that to any",
        )
    if case.logic_differs is False and (is_many_times_its_noise(case) or _in_proportion(case)):
        again = "" if case.right_recompiled is None else ", and wrong again where it is compiled once more"
        return Classification(
            Kind.LOGIC,
            "logic.this_dtype",
            f"wrong in {_name(case)} only, by far more than any rounding: compiled in float64 it is right{again}",
        )
    if case.logic_differs is False:
        return _plain(
            Kind.PRECISION,
            "further from float64 than this program's rounding explains; compiled in float64 it is right",
        )
    return _without_twin(case)


def _without_twin(case: Evidence) -> Classification:
    """Classify by the size of the difference: no twin showed whether the logic is right or wrong."""
    if not is_floating(case.pair.reference):
        return _plain(Kind.LOGIC, "exact values differ, and no rounding in the program explains it")
    beyond, tested = "further from float64 than this program's rounding explains", "no float64 twin could run"
    if case.high_precision is None:
        beyond = "differs from eager by more than this program's rounding explains"
        tested = "neither a float64 reference nor a float64 twin could run"
    if _beyond_any_precision(case):
        return _plain(Kind.LOGIC, f"{beyond}, and by more than any lower precision would ({tested})")
    return _plain(Kind.PRECISION, f"{beyond}, or its logic is wrong: {tested} to tell which")


def _beyond_any_precision(case: Evidence) -> bool:
    """Whether a difference is greater, in units of the noise, than computing in the coarsest dtype would make it."""
    if case.envelope is None:
        return False
    coarser = _COARSEST / torch.finfo(case.pair.reference.dtype).eps
    # `worst` is in units of what is allowed; this compares with the noise itself
    return case.outside.worst * thresholds.ENVELOPE_FACTOR > coarser


def is_many_times_its_noise(case: Evidence) -> bool:
    """Whether a tensor as a whole is further off than the coarsest dtype would make it.

    Single small elements say nothing: they may lose all of their digits to rounding inside a kernel.
    """
    if case.envelope is None or not is_floating(case.pair.reference):
        return False
    return case.metrics.rmse > times_of_noise(case.pair.reference.dtype) * case.envelope.rms


def times_of_noise(dtype: torch.dtype) -> float:
    """How many times as far as its noise the coarsest dtype would put a tensor of a floating dtype."""
    return max(_COARSEST / torch.finfo(dtype).eps, thresholds.PRECISION_ENVELOPES)


def _in_proportion(case: Evidence) -> bool:
    """Whether a tensor is eager's times one number: doubled, or zero. Rounding errors have no common factor."""
    if not is_floating(case.pair.reference) or case.pair.reference.numel() < thresholds.FACTOR_ELEMENTS:
        return False
    reference, candidate = (widened(one).to(torch.float64) for one in (case.pair.reference, case.pair.candidate))
    squares = float(reference.square().sum())
    if not 0 < squares < float("inf") or not bool(candidate.isfinite().all()):
        return False
    factor = float((reference * candidate).sum()) / squares
    left = root_mean_square(candidate - factor * reference)
    apart = abs(factor - 1)
    return apart > _COARSEST and left <= thresholds.FACTOR_REMAINDER * apart * root_mean_square(reference)


def _name(case: Evidence) -> str:
    return str(case.pair.reference.dtype).removeprefix("torch.")
