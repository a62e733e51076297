"""What a check knows: of one tensor on its way through the steps, and of all of them together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from checked_backend.findings import Metrics, NoiseScale
from checked_backend.numerics.bits import is_floating
from checked_backend.verdict import thresholds
from checked_backend.verdict.decisions import Decisions, TensorPair
from checked_backend.verdict.elements import (
    all_finite,
    difference,
    least_number,
    local_root_mean_square,
    root_mean_square,
)
from checked_backend.verdict.envelope import Envelope, NoiseBaseline
from checked_backend.verdict.outliers import Outliers, half_of_digits, outside_noise
from checked_backend.verdict.runner import Runs, Values


@dataclass(slots=True, eq=False)
class Evidence:
    """One tensor of both executions, with the evidence gathered.

    Attributes:
        low_precision: Whether the region computes in half precision somewhere.
        spread: How far two runs of eager are apart, root mean square.
        reads_junk: Whether eager repeats it bit for bit if it is left as it is, but not in control runs, which fill
            uninitialised memory with junk.
        envelope: Noise from Monte Carlo runs.
        envelope_large: Noise from Monte Carlo runs with larger roundings.
        outside: Elements that noise does not explain. Before there is an envelope, no difference is explained.
        high_precision: Eager's float64 result, infinite where it is beyond the range of the tensor's dtype.
        float64_nonfinite: Where eager has a number and float64 has none, so that it confirms nothing; None if nowhere.
        float64_envelope: How far eager's perturbed runs in float64 lie from the float64 reference; None if there were
            none, as where eager repeats itself and its float64 twin agrees.
        float64_envelope_large: The distance of further runs, made if the twin is outside of the first ones.
        logic_differs: Whether the float64 twin computes something else where float64 has numbers; None if that could
            not be found out.
        not_reproduced: Whether the candidate gave this value in the checked call, and never again.
        right_recompiled: Whether the region compiled once more, at its own dtypes, is right; None if not tried.
        evidence: The evidence that a finding will show.
        closed: Whether the tensor is decided.
    """

    pair: TensorPair
    metrics: Metrics
    low_precision: bool = False
    spread: float = 0.0
    reads_junk: bool = False
    envelope: Envelope | None = None
    envelope_large: Envelope | None = None
    outside: Outliers = field(default_factory=lambda: Outliers(1, 0, float("inf")))
    high_precision: torch.Tensor | None = None
    float64_nonfinite: torch.Tensor | None = None
    twin: torch.Tensor | None = None
    float64_envelope: Envelope | None = None
    float64_envelope_large: Envelope | None = None
    logic_differs: bool | None = None
    not_reproduced: bool = False
    right_recompiled: bool | None = None
    evidence: dict[str, Any] = field(default_factory=dict)
    closed: bool = False

    @classmethod
    def of(cls, pair: TensorPair, metrics: Metrics, *, low_precision: bool = False) -> Evidence:
        """New evidence about a pair. If no element differs, noise has nothing to explain."""
        case = cls(pair, metrics, low_precision)
        if metrics.bitwise_equal:
            case.outside = Outliers(0, 0, 0.0)
        return case

    @property
    def same_bits(self) -> bool:
        """Whether no element differs. Then only the float64 twin can show that the logic is wrong."""
        return self.metrics.bitwise_equal

    def sample(self, values: Values | None) -> torch.Tensor | None:
        """This tensor in a control run; None where there is no run, or it has none of that shape.

        A perturbed comparison can change a shape.
        """
        found = None if values is None else values.get(self.pair.name)
        if found is None or found.shape != self.pair.reference.shape:
            return None
        return found

    def sample_in_float64(self, values: Values | None) -> torch.Tensor | None:
        """This tensor in a run in float64, infinite where it would be infinite at the program's own precision."""
        found = self.sample(values)
        if found is None or not found.dtype.is_floating_point:
            return found
        rounded = found.to(self.pair.reference.dtype)
        if rounded.dtype.itemsize == 1:
            rounded = rounded.float()  # torch has no arithmetic for float8
        return found if all_finite(rounded) else torch.where(rounded.isinf(), rounded.to(found.dtype), found)

    def outliers(self, candidate: torch.Tensor, *, strong: bool = True) -> Outliers:
        """The elements of a candidate that the noise known so far does not explain; there must be an envelope.

        Args:
            strong: Whether the noise of larger roundings explains some.
        """
        if self.envelope is None:
            raise RuntimeError("the noise of this tensor is not known")
        return outside_noise(
            reference=self.pair.reference,
            candidate=candidate,
            envelope=self.envelope,
            high_precision=self.high_precision,
            strong=self.envelope_large if strong else None,
            low_precision=self.low_precision,
        )

    def widen(self, values: Values, *, large: bool, float64: bool) -> None:
        """Take one more control run into the envelope of its kind."""
        reference = self.high_precision if float64 else self.pair.reference
        sample = self.sample_in_float64(values) if float64 else self.sample(values)
        if reference is None or sample is None:
            return
        name = f"{'float64_' if float64 else ''}envelope{'_large' if large else ''}"
        known: Envelope | None = getattr(self, name)
        if known is None:
            setattr(self, name, Envelope.of(reference, sample))
        else:
            known.add(reference, sample)

    @property
    def spreads(self) -> bool:
        """Whether two runs of eager differ by more than a rounding or two; in integers, whether they differ."""
        dtype, size = self.pair.reference.dtype, self.metrics.reference_rms
        floats = is_floating(self.pair.reference)
        return self.spread > (thresholds.SPREAD_ROUNDOFFS * torch.finfo(dtype).eps * size if floats else 0.0)

    def is_there(self, values: torch.Tensor) -> bool:
        """Whether values are of about eager's size, and not next to nothing. Zero is near to any small tensor."""
        return root_mean_square(values) * 2.0**thresholds.NEIGHBOUR_BITS >= self.metrics.reference_rms

    @property
    def float64_repeats(self) -> bool:
        """Whether eager repeats itself in float64, with other junk in uninitialised memory."""
        if self.float64_envelope is None or self.high_precision is None or self.float64_says_nothing:
            return False
        return self.float64_envelope.rms <= thresholds.VANISHING * root_mean_square(self.high_precision)

    @property
    def float64_says_nothing(self) -> bool:
        """Whether float64 says nothing about any element."""
        return self.float64_nonfinite is not None and bool(self.float64_nonfinite.all())

    @property
    def is_zero_in_float64(self) -> bool:
        """Whether this tensor is nothing but rounding: its float64 result is zero beside its noise and its size."""
        if self.envelope is None or self.high_precision is None or self.float64_nonfinite is not None:
            return False
        size = root_mean_square(self.high_precision)
        found = max(self.metrics.reference_rms, self.metrics.rmse)
        return size <= thresholds.VANISHING * self.envelope.rms and size <= thresholds.FAR_SMALLER * found

    def noise(self) -> NoiseScale | None:
        """The noise scale, for a finding."""
        if self.envelope is None:
            return None
        large = self.envelope_large
        stronger = "" if large is None else f" and {large.runs} with larger roundings"
        source = f"Monte Carlo arithmetic on eager, {self.envelope.runs} runs{stronger}"
        source += "" if self.high_precision is None else ", float64 reference"
        source += "" if self.logic_differs is None else ", float64 twin"
        scale = self.metrics.reference_rms
        limit = thresholds.ENVELOPE_FACTOR * self.envelope.rms / scale if scale else None
        return NoiseScale(self.envelope.rms, self.envelope.max, source, limit)

    def detection_limit(self) -> float:
        """The smallest relative error that these controls would have caught."""
        if self.logic_differs is False:
            known = self.float64_envelope, self.float64_envelope_large
            spread = max((runs.rms for runs in known if runs is not None), default=0.0)
            # eager may have NaN where float64 has large numbers, and noise where float64 has zeros
            size = max(self._size(), 0.0 if self.high_precision is None else root_mean_square(self.high_precision))
            logic = max(thresholds.TWIN_TOLERANCE, thresholds.TWIN_ENVELOPE_FACTOR * spread / size)
            return logic if self.float64_nonfinite is None else max(logic, self.own_precision_limit())
        return self.own_precision_limit()

    def own_precision_limit(self) -> float:
        """The relative error that the noise of the tensor's own precision hides, whatever difference was seen.

        Where only eager has NaN or infinity, it is the error that is allowed beside float64.
        """
        dtype = self.pair.reference.dtype
        least = float(torch.finfo(dtype).eps) if is_floating(self.pair.reference) else 0.0
        if self.metrics.nonfinite_mismatched and least:
            least = half_of_digits(dtype, low_precision=self.low_precision)
        noise = thresholds.ENVELOPE_FACTOR * self.envelope.rms if self.envelope else 0.0
        return max(least, noise / self._size(), least_number(dtype) / self._size())

    def mostly_hidden(self) -> bool:
        """Whether most of the tensor (of its squares) is in elements that are no larger than what noise allows them."""
        if self.logic_differs is False and self.high_precision is not None:
            reference = self.high_precision
            noises = (
                (self.float64_envelope, thresholds.TWIN_ENVELOPE_FACTOR),
                (self.float64_envelope_large, thresholds.DRAW_FACTOR),
            )
        else:
            reference = self.pair.reference
            noises = (self.envelope, thresholds.ENVELOPE_FACTOR), (None, 0.0)
        size = difference(reference, torch.zeros_like(reference)).to(torch.float64).nan_to_num_(posinf=0.0)
        hidden = torch.zeros(size.shape, dtype=torch.bool, device=size.device)
        for runs, factor in noises:
            if runs is not None:
                hidden |= factor * runs.values >= size
        if self.float64_nonfinite is not None:
            own = difference(self.pair.reference, torch.zeros_like(self.pair.reference)).to(torch.float64)
            size = torch.where(self.float64_nonfinite, own, size)
            hidden = torch.where(self.float64_nonfinite, self._lost_in_its_noise(own), hidden)
        weight = (size / (size.max() or 1.0)).square()
        return bool((weight * hidden).sum() >= weight.sum() / 2)

    def _lost_in_its_noise(self, size: torch.Tensor) -> torch.Tensor:
        """Elements that are no larger than their noise at their own precision allows, or that noise turns into NaN."""
        if self.envelope is None:
            return torch.ones_like(size, dtype=torch.bool)
        values = self.envelope.values
        noise = torch.maximum(values.to(torch.float64), local_root_mean_square(values, size))
        lost = thresholds.ENVELOPE_FACTOR * noise >= size
        return lost if self.envelope.unstable is None else lost | self.envelope.unstable

    def explained_by_jumps_alone(self) -> int:
        """How many elements differ by more than noise and are explained by larger roundings alone, not by float64.

        Larger roundings make values next to a singularity jump by any factor. Float64 tells a candidate that jumps
        from one that is wrong. Where float64 has no number, nothing can tell.
        """
        if self.float64_nonfinite is None or self.envelope_large is None or self.envelope is None or self.same_bits:
            return 0
        return self.outliers(self.pair.candidate, strong=False).unconfirmed

    def remembered(self) -> NoiseBaseline:
        """The noise scale, for later calls. In half precision noise as large as the tensor settles them too."""
        size = self._size()
        noise = max(self.envelope.rms if self.envelope else 0.0, self.metrics.rmse) / size
        greatest = max(self.envelope.max if self.envelope else 0.0, self.metrics.max_abs_diff)
        sizes = (self.metrics.reference_rms, size) if self.is_zero_in_float64 else None
        return NoiseBaseline(
            noise,
            greatest / size,
            sizes,
            settles=self.low_precision or self.is_zero_in_float64 or noise * thresholds.ENVELOPE_FACTOR <= 1,
            own=None if self.envelope is None else (self.envelope.rms / size, self.envelope.max / size),
        )

    def _size(self) -> float:
        return self.metrics.reference_rms or 1.0


LOW_PRECISION = frozenset({torch.float16, torch.bfloat16})


@dataclass(slots=True)
class Context:
    """The tensors of one check that one look did not settle, and everything the steps ask and decide about them.

    Attributes:
        needs_no_twin: Names of tensors that an earlier call decided about, and that need no float64 twin in this one.
        thorough: Run the float64 twin for every difference.
        repeated: Eager's values when it ran again; None if it could not be run.
    """

    cases: Sequence[Evidence]
    runs: Runs
    decisions: Decisions
    needs_no_twin: frozenset[str]
    thorough: bool
    repeated: Values | None = None

    def open(self) -> list[Evidence]:
        """The tensors that are not decided yet."""
        return [case for case in self.cases if not case.closed]

    def wants_twin(self, case: Evidence) -> bool:
        """Whether noise or rounding may hide an error that only the float64 twin can show."""
        if case.pair.name in self.needs_no_twin:
            return False
        dtype = case.pair.reference.dtype
        if case.same_bits or dtype in LOW_PRECISION or (self.thorough and is_floating(case.pair.reference)):
            return True
        # integers flip between equal values, or next to a threshold
        if case.spreads or not is_floating(case.pair.reference):
            return True
        # A float32 gradient of a region under autocast has bfloat16's noise, in which an error of some percent is lost.
        # A tensor that is zero but for rounding needs no twin: the twin could only say just that.
        if case.envelope is None or not dtype.is_floating_point or case.is_zero_in_float64:
            return False
        return case.envelope.rms > thresholds.HIDING_ROUNDOFFS * torch.finfo(dtype).eps * case.metrics.reference_rms
