"""Noise or bug: decide about differences, one layer of evidence after the other.

Each layer runs only if those before did not settle it:

1. bitwise equal, or within a scale that an earlier call of the region established: nothing to decide;
2. Monte Carlo arithmetic: within the noise that the program must have at its precision;
3. float64: as close to the high-precision reference as eager is; and the float64 twin: the compiler's logic, apart from
   all rounding;
4. repetition: what eager itself does not repeat is nondeterministic;
5. more and stronger Monte Carlo runs for the few elements that are left (a comparison or a rounding that flips).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from checked_backend.numerics.judge import (
    CORRELATED_MAGNITUDE,
    ENVELOPE_FACTOR,
    STRONG_MAGNITUDE,
    TWIN_TOLERANCE,
    Outside,
    as_good_as_eager,
    outside_noise,
    twin_difference,
)
from checked_backend.numerics.measure import measure
from checked_backend.numerics.noise import Envelope, RememberedScale, difference, root_mean_square
from checked_backend.numerics.screen import Glance, screen
from checked_backend.record import Finding, Kind, Metrics, NoiseScale, Skip
from checked_backend.regions.controls import Controls, Values
from checked_backend.regions.rulings import Pair, Rulings

__all__ = ["Pair", "Rulings", "adjudicate"]

FIRST_RUNS = 3
"""Monte Carlo runs when a tensor is adjudicated for the first time."""

MORE_RUNS = 8
"""Further runs at each magnitude, for elements still unexplained."""

REPEATS = 1e-6
"""A float64 reference repeats itself if its control runs, with junk in uninitialised memory, spread less, relative."""

CHEAP_SLACK = 4.0
"""How much a remembered scale may be exceeded before a tensor is adjudicated again."""

HIDING_NOISE = (256.0, 0.1)
"""Relative noise that calls for the float64 twin: more than this many roundoffs, less than this part of the value."""

LOW_PRECISION = frozenset({torch.float16, torch.bfloat16})


def adjudicate(
    pairs: Sequence[Pair],
    controls: Callable[[], Controls],
    known: dict[str, RememberedScale],
    *,
    thorough: bool = False,
) -> Rulings:
    """Judge the values of a check.

    Args:
        pairs: Tensors of equal shape and dtype.
        controls: Makes the control runs; called only if one is needed.
        known: Scales from earlier calls.
        thorough: Run the float64 twin for every difference, not only for suspicious ones and low precision.
    """
    rulings = Rulings()
    undecided: list[tuple[Pair, Metrics]] = []
    for pair in pairs:
        scale = known.get(pair.name)
        try:
            glance = screen(reference=pair.reference, candidate=pair.candidate)
            if glance is not None and _settled(glance, scale):
                rulings.compared += 1
                continue
            metrics = measure(reference=pair.reference, candidate=pair.candidate)
        except Exception as error:  # a tensor that cannot be measured is never a pass
            rulings.skips.append(Skip(pair.subject, f"could not be measured: {_short(error)}", matters=True))
            continue
        rulings.compared += 1
        if metrics.bitwise_equal:
            continue
        undecided.append((pair, metrics))
    if undecided:
        _Hearing(undecided, controls(), rulings, known, thorough).run()
    return rulings


def _settled(glance: Glance, scale: RememberedScale | None) -> bool:
    return glance.max_abs_diff == 0 or (scale is not None and scale.covers(glance, slack=CHEAP_SLACK))


@dataclass(slots=True)
class _Case:
    """One tensor on its way through the layers."""

    pair: Pair
    metrics: Metrics
    envelope: Envelope | None = None
    strong: Envelope | None = None
    outside: Outside = field(default_factory=lambda: Outside(1, 0, float("inf")))
    high_precision: torch.Tensor | None = None
    logic_differs: bool | None = None
    float64_repeats: bool = False
    evidence: dict[str, Any] = field(default_factory=dict)
    closed: bool = False


class _Hearing:
    """The layers, over all undecided tensors of one check."""

    def __init__(
        self,
        undecided: Sequence[tuple[Pair, Metrics]],
        controls: Controls,
        rulings: Rulings,
        known: dict[str, RememberedScale],
        thorough: bool,
    ) -> None:
        self._cases = [_Case(pair, metrics) for pair, metrics in undecided]
        self._controls = controls
        self._rulings = rulings
        self._known = known
        self._thorough = thorough
        self._repeated: Values | None = None

    def run(self) -> None:
        """Take every case to a ruling."""
        self._repeated = self._control("repeated reference", self._controls.repeat)
        self._perturb(range(FIRST_RUNS), 1.0)
        self._compare()
        wanted = [case for case in self._open() if case.outside or self._wants_twin(case)]
        if wanted:
            self._float64(wanted)
        for case in self._open():
            if not case.outside and not case.logic_differs:
                self._close_as_noise(case)
        self._nondeterminism()
        if any(not case.logic_differs for case in self._open()):
            self._good_as_eager()
            self._more_perturbation()
        randomness = self._candidate_on_recorded_randomness() if self._open() else None
        for case in self._open():
            self._close_as_wrong(case, randomness)

    def _open(self) -> list[_Case]:
        return [case for case in self._cases if not case.closed]

    def _wants_twin(self, case: _Case) -> bool:
        dtype = case.pair.reference.dtype
        if case.pair.name in self._known:
            return False  # the twin of this region has been compared before
        if dtype in LOW_PRECISION or (self._thorough and (dtype.is_floating_point or dtype.is_complex)):
            return True
        # A float32 gradient of a region under autocast has bfloat16's noise, in which an error of percents is lost.
        scale = case.metrics.reference_rms
        if case.envelope is None or not scale or not dtype.is_floating_point:
            return False
        return HIDING_NOISE[0] * torch.finfo(dtype).eps < case.envelope.rms / scale < HIDING_NOISE[1]

    def _control(self, name: str, run: Callable[[], Values]) -> Values | None:
        try:
            return run()
        except Exception as error:  # recorded: a control that could not run is in the coverage
            self._rulings.skips.append(Skip(f"control: {name}", _short(error)))
            return None

    def _perturb(self, seeds: Sequence[int], magnitude: float) -> None:
        for seed in seeds:
            values = self._control("Monte Carlo arithmetic", partial(self._controls.monte_carlo, seed, magnitude))
            if values is None:
                return
            for case in self._open():
                sample = values.get(case.pair.name)
                if sample is None or sample.shape != case.pair.reference.shape:
                    continue  # a perturbed comparison can change a data-dependent shape
                if magnitude < STRONG_MAGNITUDE:
                    case.envelope = _extended(case.envelope, case.pair.reference, sample)
                else:
                    case.strong = _extended(case.strong, case.pair.reference, sample)

    def _compare(self) -> None:
        for case in self._open():
            if case.envelope is not None:
                case.outside = outside_noise(
                    reference=case.pair.reference,
                    candidate=case.pair.candidate,
                    envelope=case.envelope,
                    high_precision=case.high_precision,
                    strong=case.strong,
                )

    def _float64(self, cases: Sequence[_Case]) -> None:
        high = self._control("high-precision reference", lambda: self._controls.high_precision(None))
        if high is None:
            return
        for case in cases:
            case.high_precision = high.get(case.pair.name)
        self._compare()
        twin = self._control("float64 twin", self._controls.twin)
        if twin is None:
            return
        noise = [self._control("float64 noise", partial(self._controls.high_precision, seed)) for seed in (1, 2)]
        for case in cases:
            name = case.pair.name
            if name not in high or name not in twin or twin[name].shape != high[name].shape:
                continue
            envelope: Envelope | None = None
            for sample in noise:
                if sample is None or name not in sample or sample[name].shape != high[name].shape:
                    continue
                envelope = _extended(envelope, high[name], sample[name])
            found = twin_difference(high_precision=high[name], twin=twin[name], envelope=envelope)
            case.logic_differs = found.differs
            case.float64_repeats = envelope is not None and envelope.rms <= REPEATS * root_mean_square(high[name])
            case.evidence["float64 twin differs from float64 reference, relative"] = found.relative

    def _nondeterminism(self) -> None:
        if self._repeated is None:
            return
        for case in self._open():
            again = self._repeated.get(case.pair.name)
            if again is None or again.shape != case.pair.reference.shape:
                continue
            spread = difference(case.pair.reference, again)
            if not bool((spread != 0).any()):
                case.evidence["eager repeats itself"] = "bit for bit"
                continue
            case.evidence["eager's own spread between two runs, rms"] = root_mean_square(spread)
            if case.logic_differs and case.float64_repeats:
                continue  # only rounding is not reproducible: in float64, with other junk in memory, eager is
            self._close(
                case,
                Kind.NONDETERMINISTIC,
                "eager does not repeat itself from the same inputs and random state, so there is nothing to compare "
                "with (uninitialised memory, or an operator without a fixed order of summation)",
            )

    def _good_as_eager(self) -> None:
        for case in self._open():
            if case.high_precision is None or case.logic_differs:
                continue
            closeness = as_good_as_eager(
                reference=case.pair.reference, candidate=case.pair.candidate, high_precision=case.high_precision
            )
            case.evidence["eager's distance from float64, rms"] = closeness.eager
            case.evidence["candidate's distance from float64, rms"] = closeness.candidate
            if closeness.as_good:
                self._close_as_noise(case)

    def _more_perturbation(self) -> None:
        """Look closer at what is left: more runs, then stronger ones, which show what jumps and what cancels."""
        for number, magnitude in enumerate((1.0, CORRELATED_MAGNITUDE, STRONG_MAGNITUDE), start=1):
            if not any(not case.logic_differs for case in self._open()):
                return
            self._perturb(range(100 * number, 100 * number + MORE_RUNS), magnitude)
            self._compare()
            for case in self._open():
                if not case.outside and not case.logic_differs:
                    self._close_as_noise(case)

    def _candidate_on_recorded_randomness(self) -> Values | None:
        return self._control("candidate on recorded random numbers", self._controls.repeat_candidate)

    def _close_as_noise(self, case: _Case) -> None:
        scale = case.metrics.reference_rms or 1.0
        envelope = case.envelope
        rms = max(envelope.rms if envelope else 0.0, case.metrics.rmse)
        greatest = max(envelope.max if envelope else 0.0, case.metrics.max_abs_diff)
        source = self._noise_source(case)
        power = TWIN_TOLERANCE if case.logic_differs is False else ENVELOPE_FACTOR * rms / scale
        if case.metrics.nonfinite_mismatched == 0:
            self._rulings.scales[case.pair.name] = RememberedScale(rms / scale, greatest / scale, source, power)
        case.closed = True

    def _noise_source(self, case: _Case) -> str:
        parts = []
        if case.envelope is not None:
            stronger = f" and {case.strong.runs} with larger roundings" if case.strong is not None else ""
            parts.append(f"Monte Carlo arithmetic on eager, {case.envelope.runs} runs{stronger}")
        if case.high_precision is not None:
            parts.append("float64 reference")
        if case.logic_differs is not None:
            parts.append("float64 twin")
        return ", ".join(parts) or "none: no control could run"

    def _close_as_wrong(self, case: _Case, on_recorded_randomness: Values | None) -> None:
        pair = case.pair
        if case.envelope is None and case.high_precision is None:
            self._rulings.skips.append(Skip(pair.subject, "no control could run, so it was not judged", matters=True))
            self._close(case, Kind.UNSUPPORTED, "differs from eager, and no control could run to tell noise from error")
            return
        if self._agrees(case, on_recorded_randomness):
            alone = self._control("candidate alone", self._controls.candidate_alone)
            if self._agrees(case, alone):
                self._rulings.skips.append(
                    Skip(pair.subject, "another thread drew random numbers while the candidate ran", matters=True)
                )
                case.closed = True
                return
            self._close(
                case,
                Kind.RNG,
                "the compiled program draws other random numbers than eager from the same random state; on eager's "
                "random numbers it agrees",
                detail="rng.stream",
            )
            return
        outside = case.outside
        case.evidence["elements outside of the noise"] = outside.count
        if outside.nonfinite:
            self._close(case, Kind.NONFINITE, "NaN or infinity where eager and float64 have none, or the reverse")
        elif pair.kind is not None:
            self._close(case, pair.kind, "its values are wrong, beyond any rounding", detail=pair.detail)
        elif case.logic_differs:
            self._close(case, Kind.LOGIC, "wrong also when compiled in float64, so this is no rounding error")
        elif case.logic_differs is None and not _is_floating(pair.reference):
            self._close(case, Kind.LOGIC, "exact values differ, and no rounding in the program explains it")
        else:
            self._close(
                case,
                Kind.PRECISION,
                "further from float64 than this program's rounding explains"
                + ("; compiled in float64 it is right" if case.logic_differs is False else ""),
            )

    def _agrees(self, case: _Case, values: Values | None) -> bool:
        """Whether another run of the candidate, on the right random numbers, has other values and right ones."""
        if values is None or case.envelope is None or case.logic_differs:
            return False  # the float64 twin ran on the recorded random numbers too
        replayed = values.get(case.pair.name)
        if (
            replayed is None
            or replayed.shape != case.pair.reference.shape
            or replayed.dtype != case.pair.reference.dtype
        ):
            return False
        if not bool((difference(replayed, case.pair.candidate) != 0).any()):
            return False  # the random numbers made no difference to the candidate
        return not outside_noise(reference=case.pair.reference, candidate=replayed, envelope=case.envelope)

    def _close(self, case: _Case, kind: Kind, message: str, *, detail: str = "") -> None:
        envelope = case.envelope
        self._rulings.findings.append(
            Finding(
                kind=kind,
                detail=detail or str(kind),
                subject=case.pair.subject,
                message=message,
                metrics=case.metrics,
                noise=None
                if envelope is None
                else NoiseScale(
                    envelope.rms,
                    envelope.max,
                    self._noise_source(case),
                    ENVELOPE_FACTOR * envelope.rms / case.metrics.reference_rms if case.metrics.reference_rms else None,
                ),
                evidence=case.evidence,
                source=case.pair.source or None,
            )
        )
        case.closed = True


def _extended(envelope: Envelope | None, reference: torch.Tensor, sample: torch.Tensor) -> Envelope:
    if envelope is None:
        return Envelope.of(reference, sample)
    envelope.add(reference, sample)
    return envelope


def _is_floating(tensor: torch.Tensor) -> bool:
    return tensor.dtype.is_floating_point or tensor.dtype.is_complex


def _short(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
