"""The step of float64: a reference with hardly any rounding, and a twin of the candidate with hardly any.

In float64 a difference is a difference of logic, and a value that does not repeat is not explained by rounding.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import torch

from checked_backend.findings import EvidenceKey
from checked_backend.numerics.bits import is_floating
from checked_backend.verdict import thresholds
from checked_backend.verdict.context import Context
from checked_backend.verdict.control_runner import ControlRunner
from checked_backend.verdict.control_runs import Control
from checked_backend.verdict.elements import unconfirmed
from checked_backend.verdict.evidence import Evidence, extended
from checked_backend.verdict.outliers import outside_noise
from checked_backend.verdict.repetition import spreads
from checked_backend.verdict.steps.monte_carlo import compare_with_noise, perturb
from checked_backend.verdict.twin import twin_difference

__all__ = ["ask_float64", "hold_against_twin", "run_high_precision", "spread_in_float64", "wants_twin"]

LOW_PRECISION = frozenset({torch.float16, torch.bfloat16})


def ask_float64(context: Context) -> None:
    """Ask float64 about differences outside of the noise, and about errors that the noise may hide."""
    outside = [case for case in context.open() if case.outside]
    spread = [case for case in context.open() if spreads(case)]
    hidden = [case for case in context.open() if case.outside.doubtful or wants_twin(context, case)]
    asked = [case for case in context.open() if case in outside or case in spread or case in hidden]
    if not asked or not run_high_precision(asked, context.runs):
        return
    compare_with_noise(asked)
    spread_in_float64(spread, context.runs, range(1, 1 + thresholds.TWIN_RUNS))
    doubtful = [case for case in asked if case in outside or case.outside or wants_twin(context, case)]
    if doubtful:
        hold_against_twin(doubtful, context.runs, context.decisions.notes)


def wants_twin(context: Context, case: Evidence) -> bool:
    """Whether noise or rounding may hide an error that only the float64 twin can show."""
    if case.pair.name in context.known:
        return False
    dtype = case.pair.reference.dtype
    if case.same_bits or dtype in LOW_PRECISION or (context.thorough and is_floating(case.pair.reference)):
        return True
    if spreads(case):
        return True
    if not is_floating(case.pair.reference):  # integers flip between equal values, or next to a threshold
        return True
    # A float32 gradient of a region under autocast has bfloat16's noise, in which an error of some percent is lost. A
    # tensor that is zero but for rounding needs no twin: the twin could only say just that.
    if case.envelope is None or not dtype.is_floating_point or case.vanishes:
        return False
    return case.envelope.rms > thresholds.HIDING_ROUNDOFFS * torch.finfo(dtype).eps * case.metrics.reference_rms


def run_high_precision(cases: Sequence[Evidence], runs: ControlRunner) -> bool:
    """Give each case eager's float64 result. Return whether the run could be made."""
    high = runs.run(Control.FLOAT64, lambda: runs.controls.high_precision(None))
    if high is None:
        return False
    for case in cases:
        case.high_precision = _in_range(case, case.sample(high))
        if case.high_precision is not None:
            case.blind = unconfirmed(case.pair.reference, case.high_precision)
    return True


def spread_in_float64(
    cases: Sequence[Evidence],
    runs: ControlRunner,
    seeds: Iterable[int],
    *,
    replay_choices: bool = False,
    further: bool = False,
) -> None:
    """Run eager in float64 with its roundings made random, and widen the cases' float64 envelopes.

    Args:
        cases: Tensors with a float64 reference; without any, nothing is run.
        runs: Makes the runs.
        replay_choices: Let no rounding flip a choice.
        further: Use larger roundings, to find elements that jump. Their envelope is kept apart.
    """
    magnitude = thresholds.STRONG_MAGNITUDE if further else 1.0
    for seed in seeds if cases else ():
        values = runs.run(
            Control.FLOAT64_NOISE,
            partial(runs.controls.high_precision, seed, magnitude=magnitude, replay_choices=replay_choices),
        )
        if values is None:
            return
        for case in cases:
            high, sample = case.high_precision, _in_range(case, case.sample(values))
            if high is None or sample is None:
                continue
            if further:
                case.float64_further = extended(case.float64_further, high, sample)
            else:
                case.float64_envelope = extended(case.float64_envelope, high, sample)


def hold_against_twin(cases: Sequence[Evidence], runs: ControlRunner, notes: list[str]) -> None:
    """Find the cases whose float64 twin computes something else than eager in float64.

    Args:
        cases: Tensors with a float64 reference.
        runs: Makes the runs.
        notes: Receives remarks.

    Raises:
        PostponedError: The twin has not been earned yet, and no case is outside of its noise.
    """
    urgent = any(case.outside for case in cases)
    twin = runs.run(Control.TWIN, lambda: runs.controls.twin(urgent=urgent))
    if twin is None:
        return
    for case in cases:
        found = _in_range(case, case.sample(twin))
        case.twin = None if case.high_precision is None else found
        if found is None:
            notes.append(f"{case.pair.subject}: compiled in float64 it has another shape, so the twin was not used")
    compared = [case for case in cases if case.twin is not None]
    if any(case.float64_envelope is None for case in compared):
        spread_in_float64(compared, runs, range(1, 1 + thresholds.TWIN_RUNS), replay_choices=True)
    _compare(compared)
    differing = [case for case in compared if case.logic_differs]
    if differing:  # an element that jumps in float64 (a tie, a rounding) may not jump in the first few runs
        spread_in_float64(
            differing,
            runs,
            range(1 + thresholds.TWIN_RUNS, 1 + thresholds.TWIN_RUNS + thresholds.MORE_RUNS),
            further=True,
        )
        _compare(differing)
        jumping = [case for case in differing if case.logic_differs] if runs.controls.flips(in_float64=True) else []
        if jumping:  # a choice that flips in the twin and never flipped in these runs would look like wrong logic
            spread_in_float64(jumping, runs, range(100, 100 + 2 * thresholds.MORE_RUNS), further=True)
            _compare(jumping)
        _give_choices([case for case in differing if not case.logic_differs], runs)
    differing = [case for case in differing if case.logic_differs and not case.outside]
    if any(case.envelope is None for case in differing):
        perturb(differing, runs, range(thresholds.FIRST_RUNS), 1.0)
    for case in differing:
        _let_candidate_answer(case, notes)


def _give_choices(explained: Sequence[Evidence], runs: ControlRunner) -> None:
    """Look behind jumps: with the same choices given to eager and the twin, both must compute the same."""
    given = runs.run(Control.GIVEN_CHOICES, runs.controls.with_fixed_choices) if explained else None
    if given is None:
        return
    inner = runs.of(given)
    shadows = [Evidence(case.pair, case.metrics) for case in explained]
    if not run_high_precision(shadows, inner):
        return
    hold_against_twin(shadows, inner, [])
    for case, shadow in zip(explained, shadows, strict=True):
        if shadow.logic_differs:
            case.logic_differs = True
            case.evidence[EvidenceKey.TWIN_ERROR_GIVEN_CHOICES] = shadow.twin_difference


def _in_range(case: Evidence, value: torch.Tensor | None) -> torch.Tensor | None:
    """A float64 result, made infinite where it would be infinite at the program's own precision."""
    if value is None or not value.dtype.is_floating_point:
        return value
    rounded = value.to(case.pair.reference.dtype)
    if rounded.dtype.itemsize == 1:
        rounded = rounded.float()  # torch has no arithmetic for float8
    return torch.where(rounded.isinf(), rounded.to(value.dtype), value)


def _compare(cases: Iterable[Evidence]) -> None:
    for case in cases:
        if case.high_precision is None or case.twin is None:
            continue
        found = twin_difference(
            high_precision=case.high_precision,
            twin=case.twin,
            envelope=case.float64_envelope,
            further=case.float64_further,
            blind=case.blind,
        )
        if case.all_blind:
            case.evidence[EvidenceKey.TWIN] = "says nothing: float64 has NaN or infinity wherever eager has a number"
            continue
        case.logic_differs = found.differs
        case.twin_is_equal = found.equal
        case.twin_difference = found.relative
        case.evidence[EvidenceKey.TWIN_ERROR] = found.relative


def _let_candidate_answer(case: Evidence, notes: list[str]) -> None:
    """Ignore a twin whose error would be seen in the candidate, if the candidate had it.

    Such a twin is wrong in float64 only. It is another program than the candidate (float64 has a kernel or a
    decomposition of its own), and says nothing about the candidate.
    """
    if case.envelope is None or case.twin is None:
        return
    seen = outside_noise(
        reference=case.pair.reference,
        candidate=case.twin.to(case.pair.reference.dtype),
        envelope=case.envelope,
        high_precision=case.high_precision,
    )
    if seen.worst > thresholds.TWIN_WOULD_SHOW:
        case.logic_differs = None
        notes.append(
            f"{case.pair.subject}: compiled in float64 the region is wrong where it is right at its own precision, so "
            "the float64 twin was not used"
        )
