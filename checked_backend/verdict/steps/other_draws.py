"""Do other random numbers explain a difference: the candidate's own, another thread's, or draws that flipped?"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from checked_backend.findings import EvidenceKey, Kind
from checked_backend.numerics.bits import same_bits
from checked_backend.verdict import thresholds
from checked_backend.verdict.classify import Classification
from checked_backend.verdict.control_runner import ControlRunner
from checked_backend.verdict.control_runs import Control, Values
from checked_backend.verdict.elements import difference, root_mean_square
from checked_backend.verdict.evidence import Evidence
from checked_backend.verdict.steps.fused_rounding import agrees

__all__ = ["OtherDraws"]


_OTHER_RANDOM_NUMBERS = Classification(
    Kind.RNG,
    "rng.stream",
    "the compiled program draws other random numbers than eager from the same random state; on eager's random numbers "
    "it agrees",
)


class OtherDraws:
    """Finds out whether random numbers explain tensors that differ.

    Args:
        runs: Makes control runs.
    """

    def __init__(self, runs: ControlRunner) -> None:
        self._runs = runs
        self._controls = runs.controls
        self._asked: dict[Control, Sequence[Values]] = {}
        self._others: list[str | None] = []

    def alone(self) -> Sequence[Values]:
        """Further runs of the candidate, from the random state before the call."""
        return self._several(Control.CANDIDATE_AGAIN, thresholds.CANDIDATE_RUNS)

    def only_then(self, case: Evidence) -> bool:
        """Whether the compiled program gave this value in the checked call, and never gives it again.

        Its further runs must be equal bit for bit, or right. A program that changes from run to run is another
        question.
        """
        again = [sample for values in self.alone() if (sample := case.sample(values)) is not None]
        if not again or any(one.dtype != case.pair.candidate.dtype for one in again):
            return False
        if any(same_bits(case.pair.candidate, one) for one in again):
            return False
        alike = len(again) == thresholds.CANDIDATE_RUNS and all(same_bits(again[0], one) for one in again[1:])
        return alike or all(agrees(case, values) for values in self.alone())

    def explain(self, case: Evidence) -> Classification | str | None:
        """Whether random numbers explain a case.

        Returns:
            A classification if they do and the program is wrong; the reason if the tensor stays undecided; None if
            they explain nothing. Where another thread is the question, the case takes note of the answer.
        """
        if case.logic_differs:
            return None
        replayed = self._replayed()
        by_values = self._controls.draws_by_values()
        flips = bool(by_values) and not case.same_bits
        if not agrees(case, replayed) and not (flips and replayed is None):
            return None
        if self.only_then(case):
            return self._others_drew(case)
        if flips:
            return f"it depends on what {by_values[0]} draws by computed values, and rounding changes that"
        return _OTHER_RANDOM_NUMBERS

    def _others_drew(self, case: Evidence) -> str | None:
        if not self._others:
            self._others.append(self._runs.run(Control.OTHER_THREADS, self._controls.others_drew))
        evidence = self._others[0]
        if evidence is None:
            case.evidence[EvidenceKey.OTHER_THREADS] = "nothing shows that one drew random numbers"
            return None
        if not self._plausible(case):
            case.evidence[EvidenceKey.OTHER_THREADS] = "drew random numbers, but no others make such a difference"
            return None
        return f"another thread drew random numbers: {evidence}"

    def _plausible(self, case: Evidence) -> bool:
        """Whether other random numbers make differences of that size."""
        found = difference(case.pair.reference, case.pair.candidate)
        greatest = 0.0
        for seed in thresholds.OTHER_SEEDS:
            values = self._runs.run(Control.RESEEDED, partial(self._controls.reseeded, seed))
            sample = None if values is None else case.sample(values)
            if sample is None:
                continue
            other = difference(case.pair.reference, sample)
            if not bool(other.isfinite().all()):  # other draws make NaN in some place, so they may in any place
                return True
            greatest = max(greatest, root_mean_square(other))
        return bool(found.isfinite().all()) and root_mean_square(found) <= thresholds.OTHER_DRAWS_FACTOR * greatest

    def _replayed(self) -> Values | None:
        runs = self._several(Control.CANDIDATE_REPLAYED, 1)
        return runs[0] if runs else None

    def _several(self, control: Control, count: int) -> Sequence[Values]:
        run = self._controls.rerun_candidate if control is Control.CANDIDATE_AGAIN else self._controls.replay_candidate
        if control not in self._asked:
            made = (self._runs.run(control, run) for _ in range(count))
            self._asked[control] = [values for values in made if values is not None]
        return self._asked[control]
