"""Decide about differences, one layer of evidence after the other.

Each layer runs only if those before did not settle it:

1. Monte Carlo arithmetic: within the noise that the program must have at its precision, first with the choices that
   eager makes (indices, comparisons), then with those that rounding flips;
2. float64: as close to the high-precision reference as eager is; and the float64 twin: the compiler's logic, apart from
   all rounding;
3. repetition: what eager itself does not repeat is nondeterministic;
4. more and stronger Monte Carlo runs for the few elements that are left (a comparison or a rounding that flips);
5. the candidate again: on eager's random numbers, and rounding wherever eager does.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from checked_backend.findings import Finding, Skip
from checked_backend.verdict import thresholds
from checked_backend.verdict.classify import (
    CHANGES_IN_FLOAT64,
    NONDETERMINISTIC,
    READS_JUNK,
    UNSUPPORTED,
    Classification,
    classify,
    singular,
)
from checked_backend.verdict.control_runner import ControlRunner
from checked_backend.verdict.control_runs import ControlRuns, Values
from checked_backend.verdict.decisions import Decisions
from checked_backend.verdict.envelope import difference, root_mean_square
from checked_backend.verdict.evidence import Evidence, is_floating
from checked_backend.verdict.outliers import as_good_as_eager, distances_from, outside_noise
from checked_backend.verdict.steps.float64 import hold_against_twin, run_high_precision, spread_in_float64
from checked_backend.verdict.steps.fused_rounding import FusedRounding, is_there
from checked_backend.verdict.steps.monte_carlo import compare_with_noise, perturb
from checked_backend.verdict.steps.nondeterminism import Repetition, dwarfs, is_rounding, repeat, spreads
from checked_backend.verdict.steps.other_draws import OtherDraws

__all__ = ["Steps"]


LOW_PRECISION = frozenset({torch.float16, torch.bfloat16})


class Steps:
    """The layers, over all undecided tensors of one check.

    Args:
        cases: The tensors.
        controls: Makes the control runs.
        rulings: Receives the decisions.
        known: Tensors whose float64 twin was compared in an earlier call, and whose noise hides little.
        thorough: Run the float64 twin for every difference.
        low_precision: Whether the region computes in half precision somewhere.
    """

    def __init__(
        self,
        cases: Sequence[Evidence],
        controls: ControlRuns,
        rulings: Decisions,
        known: frozenset[str],
        *,
        thorough: bool,
        low_precision: bool,
    ) -> None:
        self._cases = cases
        self._controls = controls
        self._runs = ControlRunner(controls, rulings)
        self._rulings = rulings
        self._draws = OtherDraws(self._runs)
        self._fused = FusedRounding(controls, self._runs, rulings.notes)
        self._known = known
        self._thorough = thorough
        self._low_precision = low_precision
        self._repetition = Repetition(None)
        self._anew: list[Values | None] = []

    def run(self) -> None:
        """Take every case to a ruling."""
        self._repetition = repeat(self._cases, self._runs)
        if any(not case.same_bits for case in self._cases):
            perturb(self._open(), self._runs, range(thresholds.FIRST_RUNS), 1.0, held=True)
            compare_with_noise(self._open())
            if self._controls.flips():  # whoever is not near eager with its choices may have made others
                jumping = [case for case in self._open() if case.outside]
                perturb(jumping, self._runs, range(thresholds.FIRST_RUNS), 1.0)
                compare_with_noise(jumping)
        self._float64()
        for case in self._open():
            if not case.same_bits and not is_rounding(case, self._repeated):
                self._close_as_changing(case)
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

    @property
    def _repeated(self) -> Values | None:
        return self._repetition.values

    def _open(self) -> list[Evidence]:
        return [case for case in self._cases if not case.closed]

    # layer 2

    def _float64(self) -> None:
        """Ask float64 about what is outside of the noise, and about what the noise may hide."""
        outside = [case for case in self._open() if case.outside]
        spread = [case for case in self._open() if spreads(case, self._repeated)]
        hidden = [case for case in self._open() if case.outside.doubtful or self._wants_twin(case)]
        asked = [case for case in self._open() if case in outside or case in spread or case in hidden]
        if not asked or not run_high_precision(asked, self._runs):
            return
        compare_with_noise(self._open())
        spread_in_float64(spread, self._runs, range(1, 1 + thresholds.TWIN_RUNS))
        suspects = [case for case in asked if case in outside or case.outside or self._wants_twin(case)]
        if suspects:
            hold_against_twin(suspects, self._runs, self._rulings.notes)

    def _wants_twin(self, case: Evidence) -> bool:
        """Whether noise or rounding may hide what only the float64 twin can show."""
        if case.pair.name in self._known:
            return False
        dtype = case.pair.reference.dtype
        if case.same_bits or dtype in LOW_PRECISION or (self._thorough and is_floating(case.pair.reference)):
            return True
        if spreads(case, self._repeated):
            return True
        if not is_floating(case.pair.reference):  # what flips is equal values' order, or next to a threshold
            return True
        # A float32 gradient of a region under autocast has bfloat16's noise, in which an error of percents is lost. But
        # of what is zero but for rounding, the twin could only say that it is.
        if case.envelope is None or not dtype.is_floating_point or case.vanishes:
            return False
        return case.envelope.rms > thresholds.HIDING_ROUNDOFFS * torch.finfo(dtype).eps * case.metrics.reference_rms

    # layer 3

    def _nondeterminism(self) -> None:
        if self._repeated is None:
            return
        drifting: list[Evidence] = []
        for case in self._open():
            again = case.sample(self._repeated)
            if again is None:
                continue
            spread = difference(case.pair.reference, again)
            if not bool((spread != 0).any()):
                case.evidence["eager repeats itself"] = "bit for bit"
                continue
            case.evidence["eager's own spread between two runs, rms"] = root_mean_square(spread)
            drifting.append(case)
        unknown = [case for case in drifting if case.float64_envelope is None and case.high_precision is not None]
        spread_in_float64(unknown, self._runs, range(1, 1 + thresholds.TWIN_RUNS))
        for case in drifting:
            # In float64 eager repeats itself, with other junk in memory: so only rounding is not reproducible.
            if case.float64_repeats and (case.logic_differs or dwarfs(case, self._repeated, self._runs)):
                continue
            self._close_as_changing(case)

    def _close_as_changing(self, case: Evidence) -> None:
        by_junk = case.pair.name in self._repetition.only_as_it_is
        self._close(case, READS_JUNK if by_junk else NONDETERMINISTIC)

    # layer 4

    def _good_as_eager(self) -> None:
        for case in self._open():
            # What has lost its digits is too small for these distances. Of integers each is right or wrong, and that
            # eager has some wrong excuses no others.
            if case.logic_differs or case.outside.digits or not is_floating(case.pair.reference):
                continue
            if case.outside.unconfirmed:  # float64 does not tell who is wrong there
                continue
            if self._nearness(case):
                self._close_as_noise(case)

    @staticmethod
    def _nearness(case: Evidence) -> bool:
        """Is the candidate as close to float64 as eager? Takes note of both distances."""
        if case.high_precision is None:
            return False
        closeness = as_good_as_eager(
            reference=case.pair.reference,
            candidate=case.pair.candidate,
            high_precision=case.high_precision,
            up_to=case.outside.largest * 2**thresholds.NEIGHBOUR_BITS if case.outside else float("inf"),
        )
        case.evidence["eager's distance from float64, rms"] = closeness.eager
        case.evidence["candidate's distance from float64, rms"] = closeness.candidate
        return closeness.as_good

    def _more_perturbation(self) -> None:
        """Look closer at what is left: more runs, then stronger ones, which show what jumps and what cancels."""
        for number, magnitude in enumerate(
            (1.0, thresholds.CORRELATED_MAGNITUDE, thresholds.STRONG_MAGNITUDE), start=1
        ):
            if not any(not case.logic_differs for case in self._open()):
                return
            perturb(self._open(), self._runs, range(100 * number, 100 * number + thresholds.MORE_RUNS), magnitude)
            compare_with_noise(self._open())
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
        runs = self._draws.alone()
        for case in differing:
            again = [sample for values in runs if (sample := case.sample(values)) is not None]
            if again:
                times = sum(_still_differs(case, sample) for sample in again)
                case.evidence["the difference repeats"] = f"in {times} of {len(again)} more runs of the candidate"
                case.only_then = not times and self._draws.only_then(case)
        # the twin was compiled apart from the user's program: is that why it is right?
        for case in differing:
            if case.logic_differs is False and not case.only_then and case.pair.kind is None:
                anew = self._recompiled()
                sample = None if anew is None else case.sample(anew)
                case.right_anew = None if sample is None else not _still_differs(case, sample)

    def _recompiled(self) -> Values | None:
        if not self._anew:
            self._anew.append(self._runs.run("candidate compiled once more", self._controls.recompiled))
        return self._anew[0]

    def _other_random_numbers(self) -> None:
        if not self._controls.draws():
            return
        for case in self._open():
            explained = self._draws.explain(case)
            if isinstance(explained, str):
                self._not_judged(case, explained)
            elif explained is not None:
                self._close(case, explained)

    def _not_judged(self, case: Evidence, reason: str) -> None:
        self._rulings.skips.append(Skip(case.pair.subject, reason, matters=True))
        case.closed = True

    def _fused_rounding(self) -> None:
        """A fused kernel of half precision rounds less often than eager. What it does not explain remains."""
        suspects = [case for case in self._open() if case.logic_differs is False and not case.outside.nonfinite]
        if not suspects or not self._low_precision:
            return
        for case in suspects:
            if not self._draws.only_then(case) and self._fused.explains(case):
                self._close_as_noise(case)

    # rulings

    def _close_as_noise(self, case: Evidence) -> None:
        if self._hides_everything(case):
            return
        if case.metrics.nonfinite_mismatched == 0:
            self._rulings.scales[case.pair.name] = case.remembered(coarse=self._low_precision)
        if case.has_numbers():
            self._rulings.limits[case.pair.name] = case.detection_limit()
        if case.blind is not None:
            self._rulings.notes.append(
                f"{case.pair.subject}: float64 has NaN or infinity in {int(case.blind.sum())} of its elements where "
                "eager has numbers, and confirms nothing there: they were judged by the noise of their own precision"
            )
        if case.logic_differs is False and not case.same_bits:
            self._rulings.own_precision_limits[case.pair.name] = case.own_precision_limit()
        case.closed = True

    def _hides_everything(self, case: Evidence) -> bool:
        """Whether an error of 100 % would be lost in the noise, so that nothing was judged. Closes such a case."""
        if self._low_precision and self._fused.loses(case):
            self._not_judged(case, "it is what rounding leaves, and of that the compiled program has nothing")
            return True
        if blindly_excused := case.excused_by_jumps_alone():
            self._not_judged(case, singular(blindly_excused))
            return True
        if case.detection_limit() < 1 or case.vanishes or not case.mostly_hidden():
            return False
        if case.same_bits and case.blind is not None:
            return False  # there is no difference to judge, and no limit is claimed
        if not self._wants_twin(case) or "float64 twin" in self._runs.elsewhere:
            return False  # it was asked in an earlier call, or is by another check
        if case.logic_differs is False:
            if self._changes_by_itself(case):
                return True
            double = case.pair.reference.dtype in (torch.float64, torch.complex128)  # eager is its own reference there
            if case.blind is None and (double or self._nearness(case)) and is_there(case, case.pair.candidate):
                return False  # nobody could do better
        lost = self._runs.missing.keys() & {"high-precision reference", "float64 twin"}
        why = f" (could not run: {', '.join(sorted(lost))})" if lost else ""
        if case.blind is not None:
            why = " (and float64 has NaN or infinity there where eager has numbers)"
        self._not_judged(case, f"its noise would hide an error of 100 %, so it was not judged{why}")
        return True

    def _changes_by_itself(self, case: Evidence) -> bool:
        """Noise of that size in float64: of an ill-conditioned program, or is it eager that changes now and then?"""
        again = self._runs.run("high-precision reference", lambda: self._controls.high_precision(None))
        sample = None if again is None else case.sample(again)
        if sample is None or case.high_precision is None:
            return False
        spread = root_mean_square(difference(case.high_precision, sample))
        if spread <= thresholds.FLOAT64_REPEATS * root_mean_square(case.high_precision):
            return False
        case.evidence["eager's own spread between two runs in float64, rms"] = spread
        self._close(case, CHANGES_IN_FLOAT64)
        return True

    def _close_as_wrong(self, case: Evidence) -> None:
        if case.envelope is None and case.high_precision is None:
            reason = "no control could run, so it was not judged"
            self._rulings.skips.append(Skip(case.pair.subject, reason, matters=True))
            self._close(case, UNSUPPORTED)
            return
        if case.envelope is None and not case.logic_differs and self._has_half_of_its_digits(case):
            reason = "its noise could not be found out, and half of its digits agree with float64, so it was not judged"
            self._not_judged(case, reason)
            return
        if not case.logic_differs and case.outside.overflowed == case.outside.count > 0:
            dtype = str(case.pair.reference.dtype).removeprefix("torch.")
            right = "; compiled in float64 it is right" if case.logic_differs is False else ""
            reason = (
                f"the program leaves the range of {dtype}: eager has NaN or infinity where float64 has numbers, so "
                f"there is nothing to hold the compiled program's against{right}"
            )
            self._not_judged(case, reason)
            return
        if not case.logic_differs and case.outside.unconfirmed == case.outside.count > 0:
            self._not_judged(case, singular(case.outside.count))
            return
        if not case.same_bits:
            case.evidence["elements outside of the noise"] = case.outside.count
        self._close(case, classify(case))

    @staticmethod
    def _has_half_of_its_digits(case: Evidence) -> bool:
        """Whether rounding may be all that is wrong with a tensor whose noise is not known."""
        if case.high_precision is None or not is_floating(case.pair.reference):
            return False
        distance = root_mean_square(distances_from(case.high_precision, case.pair.candidate))
        digits = float(torch.finfo(case.pair.reference.dtype).eps) ** 0.5
        return not case.metrics.nonfinite_mismatched and distance <= digits * (case.metrics.reference_rms or 0.0)

    def _close(self, case: Evidence, named: Classification) -> None:
        self._nearness(case)
        for control in ("high-precision reference", "float64 twin", "Monte Carlo arithmetic"):
            if control in self._runs.missing:
                case.evidence.setdefault(f"{control} could not run", self._runs.missing[control])
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


def _still_differs(case: Evidence, sample: torch.Tensor) -> bool:
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
