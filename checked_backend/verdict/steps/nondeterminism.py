"""Does eager differ from run to run, and is that rounding? If not, there is nothing to compare a tensor with.

Sums without a fixed order differ by rounding, and float64 makes rounding as much smaller as it has more digits. A
program that reads a clock, random bytes or uninitialised memory differs by as much in float64. Its spread is no noise
that could explain a difference.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from checked_backend.findings import EvidenceKey
from checked_backend.numerics.bits import is_floating
from checked_backend.verdict import thresholds
from checked_backend.verdict.classify import (
    NONDETERMINISTIC,
    OTHERWISE_WHEN_TRACED,
    READS_JUNK,
    times_of_noise,
    written_between,
)
from checked_backend.verdict.closing import close_as, close_undecided
from checked_backend.verdict.elements import difference, least_number, root_mean_square
from checked_backend.verdict.evidence import Context, Evidence
from checked_backend.verdict.runner import BARE, REPEAT, Runs, Values, monte_carlo
from checked_backend.verdict.steps.float64 import FIRST_SEEDS
from checked_backend.verdict.steps.noise import perturb


def repeat_eager(context: Context) -> None:
    """Run eager again, and where the result differs find out what changes: eager, or torch under a dispatch mode.

    Control runs need a dispatch mode. While one is active, torch itself computes some things otherwise (the gradient of
    ``prod``, singular values). That is no change of eager's: such a tensor gets eager's result without a mode.
    """
    run = context.runs.run
    recorded = run(REPEAT)
    if recorded is not None and (written := context.runs.runner.facts.written):
        now = run(BARE) or recorded
        for case in context.cases:
            if not case.same_bits and _differs(case, case.pair.reference, now):
                close_undecided(context, case, written_between(written))
    unlike = [case for case in context.cases if recorded is not None and _differs(case, case.pair.reference, recorded)]
    bare = run(BARE) if unlike else None
    steady = [case for case in unlike if bare is not None and not _differs(case, case.pair.reference, bare)]
    other = run(replace(REPEAT, junk=2)) if steady else None
    if recorded is not None:  # what eager repeats is not held twice
        context.repeated = {case.pair.name: case.pair.reference for case in context.cases if case not in unlike}
        context.repeated |= {case.pair.name: recorded[case.pair.name] for case in unlike if case.pair.name in recorded}
    for case in unlike:
        found = case.sample(recorded)
        if case in steady and context.repeated is not None and bare is not None:
            if found is not None and other is not None and not _differs(case, found, other):
                context.repeated[case.pair.name] = bare[case.pair.name]
                if _is_otherwise_when_traced(context, case, found):
                    close_as(context, case, OTHERWISE_WHEN_TRACED)
                continue
            case.reads_junk = True
        if found is not None:
            case.spread = root_mean_square(difference(case.pair.reference, found))


def _is_otherwise_when_traced(context: Context, case: Evidence, found: torch.Tensor) -> bool:
    """Whether what eager computes under a mode, and the candidate, are further from eager than coarse rounding is."""
    dtype, size = found.dtype, case.metrics.reference_rms
    if not is_floating(found):
        return False
    runs = [monte_carlo(seed, thresholds.STRONG_MAGNITUDE) for seed in range(thresholds.FIRST_RUNS)]
    samples = [sample for run in runs if (sample := case.sample(context.runs.run(run))) is not None]
    noise = max(
        torch.finfo(dtype).eps * size,
        least_number(dtype),
        *(root_mean_square(difference(found, sample)) for sample in samples),
    )
    nearest = min(root_mean_square(difference(case.pair.reference, one)) for one in (found, case.pair.candidate))
    return len(samples) == len(runs) and times_of_noise(dtype) * noise < nearest < float("inf")


def _differs(case: Evidence, one: torch.Tensor, values: Values) -> bool:
    other = case.sample(values)
    if other is not None and other.dtype == one.dtype and torch.equal(other, one):
        return False
    return other is None or bool((difference(one, other) != 0).any())


def close_what_is_no_rounding(context: Context) -> None:
    """Decide about tensors that eager changes from run to run by more than rounding does."""
    for case in context.open():
        if not case.same_bits and not _is_rounding(case):
            close_as(context, case, READS_JUNK if case.reads_junk else NONDETERMINISTIC)


def close_what_changes(context: Context) -> None:
    """Decide about tensors that eager does not repeat, where that explains the difference."""
    if context.repeated is None:
        return
    drifting: list[Evidence] = []
    for case in context.open():
        again = case.sample(context.repeated)
        if again is None:
            continue
        if not bool((difference(case.pair.reference, again) != 0).any()):
            case.evidence[EvidenceKey.EAGER_REPEATS] = "bit for bit"
            continue
        case.evidence[EvidenceKey.EAGER_SPREAD] = case.spread
        drifting.append(case)
    unknown = [case for case in drifting if case.float64_envelope is None and case.high_precision is not None]
    perturb(unknown, context.runs, FIRST_SEEDS, float64=True)
    for case in drifting:
        # In float64 eager repeats itself, also with other junk in memory. So only its rounding does not repeat, unless
        # the operator has another kernel for float64, which reads no junk.
        steady = case.float64_repeats and not _is_beyond_rounding(case, context.repeated)
        if case.logic_differs and case.float64_repeats:
            continue
        if steady and _dwarfs(case, context.repeated, context.runs):
            continue
        close_as(context, case, READS_JUNK if case.reads_junk else NONDETERMINISTIC)


def _is_beyond_rounding(case: Evidence, repeated: Values | None) -> bool:
    """Whether two runs of eager differ by more than the greatest element that they have, as no rounding does."""
    again = case.sample(repeated)
    if again is None or not again.numel():
        return False
    spread = difference(case.pair.reference, again)
    if not bool(spread.isfinite().all()):  # one of them has a number where the other has none
        return True
    both = [one.to(torch.uint8) if one.dtype is torch.bool else one for one in (case.pair.reference, again)]
    greatest = min(float(one.abs().nan_to_num(0.0, 0.0).max()) for one in both)
    return bool((spread > greatest).any())


def _is_rounding(case: Evidence) -> bool:
    """Whether rounding explains that eager differs from run to run, or eager does not differ. Float64 decides.

    If the spread is not rounding, the case takes note of it, and of that in float64.
    """
    if not case.spreads or (is_floating(case.pair.reference) and case.float64_repeats):
        return True
    double = case.pair.reference.dtype in (torch.float64, torch.complex128)
    in_float64 = None if case.float64_envelope is None else case.float64_envelope.rms
    if in_float64 is not None and not double and in_float64 <= thresholds.FAR_SMALLER * case.spread:
        return True
    case.evidence[EvidenceKey.EAGER_SPREAD] = case.spread
    case.evidence[EvidenceKey.NOISE_IN_FLOAT64] = "could not be found out" if in_float64 is None else in_float64
    return False


def _dwarfs(case: Evidence, repeated: Values, runs: Runs) -> bool:
    """Whether eager's own spread is far too small to explain how far the candidate is from eager."""
    found = difference(case.pair.reference, case.pair.candidate)
    spread = torch.zeros_like(found)
    more = (runs.run(replace(REPEAT, number=number)) for number in range(2, 2 + thresholds.FIRST_RUNS))
    for values in (repeated, *more):
        again = case.sample(values)
        if again is None:
            return False
        spread = torch.maximum(spread, difference(case.pair.reference, again).to(spread.dtype))
    if bool((found.isinf() & ~spread.isinf()).any()):
        return not bool(spread.isinf().any())
    alike = found.isfinite() & spread.isfinite()
    found, spread = found[alike], spread[alike]
    if not found.numel():
        return False
    greater = root_mean_square(found) > thresholds.SPREAD_DWARFED * root_mean_square(spread)
    return greater and bool(found.max() > thresholds.SPREAD_DWARFED * spread.max())
