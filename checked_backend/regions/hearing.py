"""Decide about differences, one layer of evidence after the other.

Each layer runs only if those before did not settle it:

1. Monte Carlo arithmetic: within the noise that the program must have at its precision;
2. float64: as close to the high-precision reference as eager is; and the float64 twin: the compiler's logic, apart from
   all rounding;
3. repetition: what eager itself does not repeat is nondeterministic;
4. more and stronger Monte Carlo runs for the few elements that are left (a comparison or a rounding that flips);
5. the candidate again: on eager's random numbers, and rounding wherever eager does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from checked_backend.numerics.judge import (
    CORRELATED_MAGNITUDE,
    STRONG_MAGNITUDE,
    as_good_as_eager,
    outside_noise,
    twin_difference,
)
from checked_backend.numerics.noise import Envelope, RememberedScale, difference, root_mean_square
from checked_backend.record import Finding, Kind, Skip
from checked_backend.regions.case import Case, extended, is_floating
from checked_backend.regions.charges import Charge, charge
from checked_backend.regions.controls import Controls, Values
from checked_backend.regions.rulings import Rulings
from checked_backend.regions.run_to_run import is_rounding, repeats, spreads

__all__ = ["Hearing", "short"]

FIRST_RUNS = 3
"""Monte Carlo runs when a tensor is adjudicated for the first time."""

MORE_RUNS = 8
"""Further runs at each magnitude, for elements still unexplained."""

TWIN_RUNS = 2
"""Monte Carlo runs in float64 that a float64 twin is held against; `MORE_RUNS` more before it is called wrong."""

CANDIDATE_RUNS = 2
"""Further runs of the candidate, to see how often a difference repeats."""

HIDING_NOISE = (256.0, 0.1)
"""Relative noise that calls for the float64 twin: more than this many roundoffs, less than this part of the value."""

LOW_PRECISION = frozenset({torch.float16, torch.bfloat16})

_NONDETERMINISTIC = Charge(
    Kind.NONDETERMINISTIC,
    "nondeterministic",
    "eager does not repeat itself from the same inputs and random state, so there is nothing to compare with "
    "(uninitialised memory, or an operator without a fixed order of summation)",
)
_UNSUPPORTED = Charge(
    Kind.UNSUPPORTED, "unsupported", "differs from eager, and no control could run to tell noise from error"
)
_OTHER_RANDOM_NUMBERS = Charge(
    Kind.RNG,
    "rng.stream",
    "the compiled program draws other random numbers than eager from the same random state; on eager's random numbers "
    "it agrees",
)


class Hearing:
    """The layers, over all undecided tensors of one check.

    Args:
        cases: The tensors.
        controls: Makes the control runs.
        rulings: Receives the decisions.
        known: Scales from earlier calls.
        thorough: Run the float64 twin for every difference.
        low_precision: Whether the region computes in half precision somewhere.
    """

    def __init__(
        self,
        cases: Sequence[Case],
        controls: Controls,
        rulings: Rulings,
        known: dict[str, RememberedScale],
        *,
        thorough: bool,
        low_precision: bool,
    ) -> None:
        self._cases = cases
        self._controls = controls
        self._rulings = rulings
        self._known = known
        self._thorough = thorough
        self._low_precision = low_precision
        self._repeated: Values | None = None
        self._missing: dict[str, str] = {}

    def run(self) -> None:
        """Take every case to a ruling."""
        self._repeated = self._control("repeated reference", self._controls.repeat)
        if any(not case.same_bits for case in self._cases):
            self._perturb(range(FIRST_RUNS), 1.0)
            self._compare()
        wanted = [case for case in self._open() if case.outside or self._wants_twin(case)]
        if wanted:
            self._float64(wanted)
        for case in self._open():
            if not case.same_bits and not is_rounding(case, self._repeated):
                self._close(case, _NONDETERMINISTIC)
        for case in self._open():
            if not case.outside and not case.logic_differs:
                self._close_as_noise(case)
        self._nondeterminism()
        if any(not case.logic_differs for case in self._open()):
            self._good_as_eager()
            self._more_perturbation()
        if self._open():
            self._try_the_candidate_again()
        for case in self._open():
            self._close_as_wrong(case)

    def _open(self) -> list[Case]:
        return [case for case in self._cases if not case.closed]

    def _wants_twin(self, case: Case) -> bool:
        dtype = case.pair.reference.dtype
        if case.pair.name in self._known:
            return False  # the twin of this region has been compared before
        if (
            case.same_bits
            or spreads(case, self._repeated)
            or dtype in LOW_PRECISION
            or (self._thorough and is_floating(case.pair.reference))
        ):
            return True
        # A float32 gradient of a region under autocast has bfloat16's noise, in which an error of percents is lost.
        scale = case.metrics.reference_rms
        if case.envelope is None or not scale or not dtype.is_floating_point:
            return False
        return HIDING_NOISE[0] * torch.finfo(dtype).eps < case.envelope.rms / scale < HIDING_NOISE[1]

    def _control(self, name: str, run: Callable[[], Values | None]) -> Values | None:
        try:
            return run()
        except Exception as error:  # recorded: a control that could not run is in the coverage
            self._missing[name] = short(error)
            skip = Skip(f"control: {name}", short(error))
            if skip not in self._rulings.skips:
                self._rulings.skips.append(skip)
            return None

    def _perturb(self, seeds: Sequence[int], magnitude: float) -> None:
        for seed in seeds:
            values = self._control("Monte Carlo arithmetic", partial(self._controls.monte_carlo, seed, magnitude))
            if values is None:
                return
            for case in self._open():
                sample = case.sample(values)
                if sample is None:
                    continue
                if magnitude < STRONG_MAGNITUDE:
                    case.envelope = extended(case.envelope, case.pair.reference, sample)
                else:
                    case.strong = extended(case.strong, case.pair.reference, sample)

    def _compare(self) -> None:
        for case in self._open():
            if case.envelope is not None and not case.same_bits:
                case.outside = outside_noise(
                    reference=case.pair.reference,
                    candidate=case.pair.candidate,
                    envelope=case.envelope,
                    high_precision=case.high_precision,
                    strong=case.strong,
                )

    # layer 2

    def _float64(self, cases: Sequence[Case]) -> None:
        high = self._control("high-precision reference", lambda: self._controls.high_precision(None))
        if high is None:
            return
        for case in cases:
            case.high_precision = case.sample(high)
        self._compare()
        twin = self._control("float64 twin", self._controls.twin)
        if twin is None:
            return
        for case in cases:
            if case.high_precision is not None and (found := twin.get(case.pair.name)) is not None:
                case.twin = found if found.shape == case.high_precision.shape else None
        held = [case for case in cases if case.twin is not None]
        envelopes: dict[str, Envelope] = {}
        self._hold_against_twin(held, envelopes, range(1, 1 + TWIN_RUNS))
        accused = [case for case in held if case.logic_differs]
        if accused:  # what jumps in float64 (a tie, a rounding) may take more than a few runs to be seen jumping
            self._hold_against_twin(accused, envelopes, range(1 + TWIN_RUNS, 1 + TWIN_RUNS + MORE_RUNS))
        accused = [case for case in accused if case.logic_differs]
        if any(case.envelope is None for case in accused):
            self._perturb(range(FIRST_RUNS), 1.0)
        for case in accused:
            self._let_candidate_answer_for_twin(case)

    def _hold_against_twin(self, cases: Sequence[Case], envelopes: dict[str, Envelope], seeds: Sequence[int]) -> None:
        for seed in seeds:
            sample = self._control("float64 noise", partial(self._controls.high_precision, seed))
            if sample is None:
                break
            for case in cases:
                name, high = case.pair.name, case.high_precision
                if high is not None and name in sample and sample[name].shape == high.shape:
                    envelopes[name] = extended(envelopes.get(name), high, sample[name])
        for case in cases:
            envelope = envelopes.get(case.pair.name)
            if case.high_precision is None or case.twin is None:
                continue
            found = twin_difference(high_precision=case.high_precision, twin=case.twin, envelope=envelope)
            case.logic_differs = found.differs
            scale = root_mean_square(case.high_precision)
            case.float64_spread = None if envelope is None else envelope.rms
            case.float64_repeats = repeats(envelope, scale)
            case.evidence["float64 twin differs from float64 reference, relative"] = found.relative

    def _let_candidate_answer_for_twin(self, case: Case) -> None:
        """A twin that is wrong by more than the candidate could hide is wrong in float64 only.

        Then it is another program than the candidate (a kernel, a decomposition of float64's own), and says nothing
        about it.
        """
        if case.outside or case.envelope is None or case.twin is None:
            return
        wrong = case.twin.to(case.pair.reference.dtype)
        if outside_noise(reference=wrong, candidate=case.pair.candidate, envelope=case.envelope):
            case.logic_differs = None
            self._rulings.notes.append(
                f"{case.pair.subject}: compiled in float64 the region is wrong where it is right at its own precision, "
                "so the float64 twin was not used"
            )

    # layer 3

    def _nondeterminism(self) -> None:
        if self._repeated is None:
            return
        for case in self._open():
            again = case.sample(self._repeated)
            if again is None:
                continue
            spread = difference(case.pair.reference, again)
            if not bool((spread != 0).any()):
                case.evidence["eager repeats itself"] = "bit for bit"
                continue
            case.evidence["eager's own spread between two runs, rms"] = root_mean_square(spread)
            if case.logic_differs and case.float64_repeats:
                continue  # only rounding is not reproducible: in float64, with other junk in memory, eager is
            self._close(case, _NONDETERMINISTIC)

    # layer 4

    def _good_as_eager(self) -> None:
        for case in self._open():
            # what has lost its digits is too small for these distances
            if not case.logic_differs and not case.outside.digits and self._nearness(case):
                self._close_as_noise(case)

    @staticmethod
    def _nearness(case: Case) -> bool:
        """Is the candidate as close to float64 as eager? Takes note of both distances."""
        if case.high_precision is None:
            return False
        closeness = as_good_as_eager(
            reference=case.pair.reference, candidate=case.pair.candidate, high_precision=case.high_precision
        )
        case.evidence["eager's distance from float64, rms"] = closeness.eager
        case.evidence["candidate's distance from float64, rms"] = closeness.candidate
        return closeness.as_good

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
        self._good_as_eager()

    # layer 5

    def _try_the_candidate_again(self) -> None:
        self._other_random_numbers()
        self._fused_rounding()
        differing = [case for case in self._open() if not case.same_bits]
        if not differing:
            return
        runs = [
            values
            for _ in range(CANDIDATE_RUNS)
            if (values := self._control("candidate again", self._controls.candidate_alone)) is not None
        ]
        for case in differing:
            again = [sample for values in runs if (sample := case.sample(values)) is not None]
            if again:
                times = sum(_still_differs(case, sample) for sample in again)
                case.evidence["the difference repeats"] = f"in {times} of {len(again)} more runs of the candidate"

    def _other_random_numbers(self) -> None:
        replayed = self._control("candidate on recorded random numbers", self._controls.repeat_candidate)
        for case in self._open():
            if not _agrees(case, replayed):
                continue
            if _agrees(case, self._control("candidate again", self._controls.candidate_alone)):
                self._rulings.skips.append(
                    Skip(case.pair.subject, "another thread drew random numbers while the candidate ran", matters=True)
                )
                case.closed = True
            else:
                self._close(case, _OTHER_RANDOM_NUMBERS)

    def _fused_rounding(self) -> None:
        """A fused kernel of half precision rounds less often than eager. What it does not explain remains."""
        suspects = [case for case in self._open() if case.logic_differs is False and not case.outside.nonfinite]
        if not suspects or not self._low_precision:
            return
        values = self._control("candidate that rounds where eager does", self._controls.unfused)
        for case in suspects:
            if _agrees(case, values):
                self._rulings.notes.append(
                    f"fusion-rounding: {case.pair.subject} differs from eager by {case.metrics.max_abs_diff:.3g} at "
                    "most, because fused kernels keep intermediate results in float32; with emulate_precision_casts, "
                    "which makes them round wherever eager does, it agrees"
                )
                self._close_as_noise(case)

    # rulings

    def _close_as_noise(self, case: Case) -> None:
        if case.metrics.nonfinite_mismatched == 0:
            self._rulings.scales[case.pair.name] = case.remembered()
        case.closed = True

    def _close_as_wrong(self, case: Case) -> None:
        if case.envelope is None and case.high_precision is None:
            reason = "no control could run, so it was not judged"
            self._rulings.skips.append(Skip(case.pair.subject, reason, matters=True))
            self._close(case, _UNSUPPORTED)
            return
        if not case.same_bits:
            case.evidence["elements outside of the noise"] = case.outside.count
        self._close(case, charge(case))

    def _close(self, case: Case, named: Charge) -> None:
        self._nearness(case)
        for control in ("high-precision reference", "float64 twin", "Monte Carlo arithmetic"):
            if control in self._missing:
                case.evidence.setdefault(f"{control} could not run", self._missing[control])
        self._rulings.findings.append(
            Finding(
                kind=named.kind,
                detail=named.detail or str(named.kind),
                subject=case.pair.subject,
                message=named.message,
                metrics=case.metrics,
                noise=case.noise(),
                evidence=case.evidence,
                source=case.pair.source or None,
            )
        )
        case.closed = True


def _agrees(case: Case, values: Values | None) -> bool:
    """Whether another run of the candidate, on other terms, has other values and right ones."""
    if values is None or case.envelope is None or case.logic_differs:
        return False  # the float64 twin ran on the recorded random numbers too
    other = case.sample(values)
    if other is None or other.dtype != case.pair.reference.dtype:
        return False
    if not bool((difference(other, case.pair.candidate) != 0).any()):
        return False  # the terms made no difference to the candidate
    return not outside_noise(reference=case.pair.reference, candidate=other, envelope=case.envelope)


def _still_differs(case: Case, sample: torch.Tensor) -> bool:
    if sample.dtype != case.pair.reference.dtype or case.envelope is None:
        return bool((difference(case.pair.reference, sample) != 0).any())
    found = outside_noise(
        reference=case.pair.reference,
        candidate=sample,
        envelope=case.envelope,
        high_precision=case.high_precision,
        strong=case.strong,
    )
    return bool(found) or bool(case.logic_differs and (difference(case.pair.reference, sample) != 0).any())


def short(error: BaseException) -> str:
    """An exception in one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
