"""Noise or bug: look at every tensor once, then ask the steps about the tensors that this does not settle.

A tensor is settled if it is equal bit for bit, or within a scale that an earlier call of the region established. In a
region that computes in half precision, equal bits settle a tensor only after its float64 twin has been compared:
rounding to half precision hides errors of a thousandth, and with some inputs hides them altogether. The twin is
compiled once for each region, at its first checked call. At a recheck it is asked again about what is not settled, but
where operators are checked by themselves about no tensor that differs by no more than another draw of its known noise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from types import MappingProxyType

from checked_backend.errors import is_out_of_memory
from checked_backend.findings import Finding, Metrics, Skip
from checked_backend.numerics.bits import is_floating
from checked_backend.numerics.measure import measure
from checked_backend.numerics.quick_diff import QuickDiff, quick_diffs
from checked_backend.verdict import thresholds
from checked_backend.verdict.closing import close_what_is_left
from checked_backend.verdict.decisions import Decisions, TensorPair
from checked_backend.verdict.envelope import NoiseBaseline, times
from checked_backend.verdict.evidence import Context, Evidence
from checked_backend.verdict.outliers import half_of_digits
from checked_backend.verdict.runner import REPEAT, Control, Runner, Runs, monte_carlo, short
from checked_backend.verdict.steps.candidate_again import try_candidate_again
from checked_backend.verdict.steps.float64 import ask_float64
from checked_backend.verdict.steps.noise import (
    close_what_is_as_good_as_eager,
    close_what_is_explained,
    explain_by_own_noise,
)
from checked_backend.verdict.steps.nondeterminism import close_what_changes, close_what_is_no_rounding, repeat_eager
from checked_backend.verdict.steps.zero_signs import zeros_of_another_sign

Step = Callable[[Context], None]

_BLIND_SPOTS = MappingProxyType(
    {
        Control.MONTE_CARLO: "Monte Carlo arithmetic cannot perturb what these return: {}",
        Control.FLOAT64: "these have no kernel for float64, so the float64 reference is no more precise there: {}",
    }
)
"""Notes about operators that the control runs could not perturb, or not compute in float64."""

STEPS: Sequence[Step] = (
    repeat_eager,
    explain_by_own_noise,
    ask_float64,
    close_what_is_no_rounding,
    close_what_is_explained,
    close_what_changes,
    close_what_is_as_good_as_eager,
    try_candidate_again,
    close_what_is_left,
)
"""The questions about a tensor that one look does not settle, in order. A step leaves decided tensors alone.

1. Repetition: what does eager itself repeat?
2. Monte Carlo arithmetic: is the difference within the noise that the program must have at its precision? First with
   the choices that eager makes (indices, comparisons), then with those that rounding flips.
3. Float64: how near is the candidate to the high-precision reference? Does the float64 twin (the compiler's logic
   without its rounding) compute the same?
4. A tensor that eager changes from run to run by more than rounding is nondeterministic.
5. A tensor that is explained by now is noise.
6. Any other tensor that eager does not repeat is nondeterministic.
7. A tensor no further from float64 than eager is noise. So is one that more and stronger Monte Carlo runs explain.
8. The candidate again: on eager's random numbers, rounding wherever eager does, and compiled once more.
9. A tensor that is still open is wrong.
"""


def decide(
    pairs: Sequence[TensorPair],
    runner: Callable[[], Runner],
    known: dict[str, NoiseBaseline],
    *,
    thorough: bool = False,
    low_precision: bool = False,
    recheck: bool = False,
    operators_checked: bool = False,
    signs: bool = False,
) -> Decisions:
    """Decide about each difference of a check: noise or bug.

    Args:
        pairs: Tensors of equal shape and dtype.
        runner: Gives what makes control runs; called only if one is needed.
        known: Noise scales from earlier calls, by name.
        thorough: Run the float64 twin for every difference, not only for suspicious ones and low precision; at a
            recheck too.
        low_precision: The region computes in half precision somewhere: run the float64 twin once for each of its
            floating tensors, also for those that are equal bit for bit.
        recheck: Settle only what is within the known noise as it is. Otherwise two draws from one noise may differ.
        operators_checked: Each operator is checked by itself: a recheck runs no twin for another draw of known noise.
        signs: Compare the signs of zeros too.
    """
    decisions = Decisions(recheck=recheck)
    runs = cache(lambda: Runs(runner(), decisions))
    cases: list[Evidence] = []
    needs_no_twin: set[str] = set()
    slack = 1.0 + 2.0**-20 if recheck else thresholds.DRAW_FACTOR  # scales are ratios, and these are rounded
    for pair, glance in zip(pairs, _glances(pairs), strict=True):
        scale = known.get(pair.name)
        try:
            ask_twin = low_precision and scale is None and is_floating(pair.reference)
            settles = partial(_settled, pair, scale, slack, decisions, anew=recheck and not low_precision)
            metrics = _examined(pair, glance, settles, decisions, ask_twin=ask_twin)
        except Exception as error:  # a tensor that cannot be measured is never a pass
            decisions.skips.append(Skip(pair.subject, f"could not be measured: {short(error)}", matters=True))
            continue
        decisions.compared += 1
        # only float64 can say whether a tensor (one with `sizes`) is still nothing but rounding
        if scale is not None and scale.settles and scale.sizes is None:
            another_draw = glance is not None and scale.covers(glance, slack=thresholds.DRAW_FACTOR)
            if not recheck or (another_draw and operators_checked and not thorough):
                needs_no_twin.add(pair.name)
        if metrics is not None:
            cases.append(Evidence.of(pair, metrics, low_precision=low_precision))
    if cases:
        context = Context(cases, runs(), decisions, frozenset(needs_no_twin), thorough=thorough)
        for step in STEPS:
            step(context)
        decisions.short_of_memory = bool(runs().short_of_memory)
        for control, operators in runs().runner.facts.left_out.items():
            if operators:
                decisions.notes.append(_BLIND_SPOTS[control].format(", ".join(sorted(operators))))
        decisions.ratios |= {case.pair.name: ratio for case in cases if (ratio := _ratio(case)) is not None}
    if signs:
        decisions.findings += zeros_of_another_sign(pairs, runs, decisions)
    return decisions


def _glances(pairs: Sequence[TensorPair]) -> list[QuickDiff | None]:
    """A quick look at each pair. Where one fails nothing is known of any; whoever measures the pair tells why."""
    try:
        return quick_diffs([(pair.reference, pair.candidate) for pair in pairs])
    except Exception:
        return [None] * len(pairs)


def _examined(
    pair: TensorPair,
    glance: QuickDiff | None,
    settles: Callable[[QuickDiff], bool],
    decisions: Decisions,
    *,
    ask_twin: bool,
) -> Metrics | None:
    """Look at a tensor once; return its full metrics if that does not settle it, else None."""
    if glance is not None and not ask_twin and (glance.max_abs_diff == 0 or settles(glance)):
        decisions.ratios.setdefault(pair.name, 0.0)
        return None
    metrics = measure(reference=pair.reference, candidate=pair.candidate)
    if ask_twin:
        return metrics
    if glance is None and is_floating(pair.reference):
        # the quick look refuses a mask's infinities and complex numbers: ask the same question of the full metrics
        glance = QuickDiff.of(metrics)
        if glance is not None and settles(glance):
            return None
    return None if metrics.bitwise_equal else metrics


def _settled(
    pair: TensorPair, scale: NoiseBaseline | None, slack: float, decisions: Decisions, glance: QuickDiff, *, anew: bool
) -> bool:
    if scale is None or not scale.covers(glance, slack=slack):
        return False
    if anew and scale.sizes is None and is_floating(pair.reference):
        # an earlier call may have had far more noise than this one
        digits = half_of_digits(pair.reference.dtype, low_precision=False)
        if glance.rmse > digits * glance.reference_rms:
            return False
    decisions.limits[pair.name] = scale.limit(glance, slack=slack)
    decisions.ratios[pair.name] = scale.ratio(glance)
    return True


def _ratio(case: Evidence) -> float | None:
    """The difference divided by the noise that this check found; None if no noise was found."""
    if case.metrics.bitwise_equal:
        return 0.0
    if case.metrics.nonfinite_mismatched:
        return float("inf")
    if case.envelope is None:
        return None
    return max(times(case.metrics.rmse, case.envelope.rms), times(case.metrics.max_abs_diff, case.envelope.max))


def tolerate_flipped_shapes(
    findings: Sequence[Finding],
    runner: Callable[[], Runner],
    name: Callable[[str], str] = lambda subject: subject,
) -> tuple[list[Finding], list[Skip]]:
    """Take out findings about shapes that change in eager too when its roundings change.

    Args:
        runner: Gives what makes control runs; called only if a shape differs.
        name: The key of a tensor among a control run's values, by its subject.

    Returns:
        The findings that remain, and a skip for each that does not: such a tensor stays undecided.
    """
    doubtful = [finding for finding in findings if finding.detail == "structure.shape"]
    if not doubtful:
        return list(findings), []
    run = runner().run
    try:
        shapes = {key: value.shape for key, value in (run(REPEAT) or {}).items()}
        changing: set[str] = set()
        for magnitude in (1.0, thresholds.STRONG_MAGNITUDE):
            for seed in range(thresholds.OTHER_RUNS):
                values = run(monte_carlo(seed, magnitude)) or {}
                changing |= {key for key, shape in shapes.items() if key not in values or values[key].shape != shape}
    except Exception as error:  # recorded: without controls the shape counts as wrong, but for want of memory
        if not is_out_of_memory(error):
            return list(findings), [Skip(f"control: {Control.SHAPES.value}", short(error))]
        tolerated, reason = doubtful, f"another shape than eager's; control runs: {short(error)}"
    else:
        tolerated = [finding for finding in doubtful if name(finding.subject) in changing]
        reason = "its shape depends on values that rounding changes, in eager too, so there is no verdict on it"
    skips = [Skip(finding.subject, reason, matters=True) for finding in tolerated]
    return [finding for finding in findings if finding not in tolerated], skips
