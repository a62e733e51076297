"""Run one case: a family's program, clean or with a planted bug, against a candidate."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import torch

from checked_backend import Report, check, collect
from checked_backend.checking.program import Program, ProgramCall
from checked_backend.modes.float64 import Float64Mode
from checked_backend.modes.monte_carlo import MonteCarloMode
from checked_backend.numerics.bits import unit_roundoff
from checked_backend.regions.torch_state import RngState
from checked_backend.verdict import closing
from checked_backend.verdict.elements import difference, root_mean_square
from checked_backend.verdict.envelope import Envelope, NoiseBaseline
from checked_backend.verdict.steps import float64 as double
from checked_backend.verdict.steps import noise as noise_runs

from .compilers import candidate, planted, trace
from .families import FAMILIES

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

EQUIVALENT = 1e-13
"""Programs that differ less than this in float64, relative, differ in rounding, not in logic."""

STEADY_CALLS = 6
"""Calls in the ``steady`` face, each with other data."""

NOISE_RUNS = 8
"""Monte Carlo runs from which a program's own noise is taken, apart from those of the check."""


@dataclass(frozen=True)
class Case:
    """What to run.

    Attributes:
        family: Name of the family.
        dtype: Name of the floating dtype.
        mode: ``inference`` or ``training``.
        compiler: Name of the candidate.
        bug: The bug to plant; "" for a clean case.
        face: ``check`` (float64 twin for every difference), ``numcheck`` (what a training script uses), or ``steady``
            (``numcheck``, called again with other data).
        seed: Of the inputs.
    """

    family: str
    dtype: str
    mode: str
    compiler: str
    bug: str = ""
    face: str = "check"
    seed: int = 0

    @property
    def key(self) -> str:
        """Names the case in a results file."""
        return "|".join(str(value) for value in asdict(self).values())


@dataclass
class Outcome:
    """What came of a case.

    Attributes:
        case: The case.
        verdict: Of the report.
        findings: ``kind subject`` of each finding.
        skips: Controls that did not run.
        effect: A planted bug's greatest effect, in float64, in units of the program's own noise at its dtype.
        visible: The same of what the bug changes at the program's own dtype.
        noise_ratio: Greatest difference over what Monte Carlo arithmetic allows, at the first look.
        twin_relative: Greatest relative difference of the float64 twin.
        twin_ratio: The same over what was allowed.
        closeness: The candidate's distance from float64 over eager's.
        steady: Greatest difference in a later call over the scale remembered from earlier ones.
        seconds: Time it took.
    """

    case: Case
    verdict: str
    findings: list[str]
    skips: list[str]
    effect: float = 0.0
    visible: float = 0.0
    noise_ratio: float = 0.0
    twin_relative: float = 0.0
    twin_ratio: float = 0.0
    closeness: float = 0.0
    steady: float = 0.0
    seconds: float = 0.0

    @property
    def failed(self) -> bool:
        return self.verdict == "fail"

    def to_json(self) -> dict[str, Any]:
        """Plain data, for a results file."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Outcome:
        return cls(**{**data, "case": Case(**data["case"])})


@dataclass
class Seen:
    """The numbers that the verdict used.

    Attributes:
        noise: Ratios of differences to what Monte Carlo arithmetic allows.
        twin: Of each float64 twin's difference, relative, and over what was allowed.
        closeness: Ratios of the candidate's distance from float64 to eager's.
        steady: Ratios of later differences to the scale remembered.
        late: What float64 did not settle either: number of Monte Carlo runs, and ratio to what they allow.
    """

    noise: list[float] = field(default_factory=list)
    twin: list[tuple[float, float]] = field(default_factory=list)
    closeness: list[float] = field(default_factory=list)
    steady: list[float] = field(default_factory=list)
    late: list[tuple[int, float]] = field(default_factory=list)


@contextmanager
def watched() -> Iterator[Seen]:
    """Listen to the verdict: its numbers are in the report only where it found something."""
    seen = Seen()
    compare_with_noise, twin_difference = noise_runs.compare_with_noise, double.twin_difference
    as_good_as_eager, covers = closing.as_good_as_eager, NoiseBaseline.covers

    def compare(cases: Any) -> None:
        compare_with_noise(cases)
        known = [case for case in cases if case.envelope is not None and not case.same_bits]
        seen.noise += [case.outside.worst for case in known if case.high_precision is None]
        late = [case for case in known if case.high_precision is not None and case.outside]
        seen.late += [(case.envelope.runs, case.outside.worst) for case in late]

    def twin(**tensors: Any) -> Any:
        found = twin_difference(**tensors)
        if not found.differs or tensors["envelope"] is not None:  # else it is compared again, with its noise
            seen.twin.append((found.relative, found.ratio))
        return found

    def close(**tensors: Any) -> Any:
        found = as_good_as_eager(**tensors)
        seen.closeness.append(found.ratio)
        return found

    def covered(self: NoiseBaseline, glance: Any, *, slack: float) -> bool:
        size = glance.reference_rms
        for gap, known in ((glance.rmse, self.rms), (glance.max_abs_diff, self.max)):
            seen.steady.append(gap / (known * size) if known * size else torch.inf if gap else 0.0)
        return covers(self, glance, slack=slack)

    with (
        mock.patch.object(NoiseBaseline, "covers", covered),
        mock.patch.object(noise_runs, "compare_with_noise", compare),
        mock.patch.object(double, "compare_with_noise", compare),
        mock.patch.object(double, "twin_difference", twin),
        mock.patch.object(closing, "as_good_as_eager", close),
    ):
        yield seen


def run_case(case: Case, *, effects: bool = True) -> Outcome:
    """Run a case; with ``effects``, measure the effect of a planted bug too."""
    began = time.perf_counter()
    subject, dtype = FAMILIES[case.family], DTYPES[case.dtype]
    training = case.mode == "training"
    tensors = subject.make(dtype, training=training, seed=case.seed)
    program = subject.program(dtype)
    with warnings.catch_warnings(), torch.set_grad_enabled(training):
        warnings.simplefilter("ignore")
        compiler = candidate(case.compiler)
        if case.bug:
            wrong = subject.program(dtype, case.bug)
            compiler = planted(trace(wrong, subject.make(dtype, training=training, seed=case.seed)), compiler)
        with watched() as seen:
            report = _checked(case, program, tensors, compiler)
        effect, visible = _effect(program, wrong, tensors, training) if case.bug and effects else (0.0, 0.0)
    return Outcome(
        case,
        str(report.verdict),
        [f"{finding.detail} {finding.subject}" for finding in report.findings],
        [f"{skip.subject}: {skip.reason}" for skip in report.coverage.skipped],
        effect,
        visible,
        max(seen.noise, default=0.0),
        max((relative for relative, _ in seen.twin), default=0.0),
        max((ratio for _, ratio in seen.twin), default=0.0),
        max(seen.closeness, default=0.0),
        max(seen.steady, default=0.0),
        time.perf_counter() - began,
    )


def _checked(case: Case, program: Callable[..., Any], tensors: tuple[Any, ...], compiler: Any) -> Report:
    training = case.mode == "training"
    if case.face == "check":
        return check(program, tensors, compiler=compiler, gradients=training, dynamic=False)
    options = {"compiler": compiler, "on_divergence": "record", "localize": False}
    torch._dynamo.reset()
    compiled = torch.compile(program, backend="numcheck", options=options, dynamic=False)
    seeds = range(case.seed, case.seed + (STEADY_CALLS if case.face == "steady" else 1))
    with collect() as session:
        for seed in seeds:
            given = FAMILIES[case.family].make(DTYPES[case.dtype], training=training, seed=seed)
            outcome = Program(program, [ProgramCall(given, {})], RngState.capture(()), training).run(lambda _: compiled)
            if outcome.error is not None:
                raise outcome.error
    torch._dynamo.reset()
    return session.report


def _effect(
    right: Callable[..., Any], wrong: Callable[..., Any], tensors: tuple[Any, ...], training: bool
) -> tuple[float, float]:
    """A bug's effect in units of the program's own noise: in float64, and at the program's own precision."""

    def values(function: Callable[..., Any], *modes: Callable[[], Any], wide: bool = False) -> dict[str, torch.Tensor]:
        entered = [mode() for mode in modes]
        program = Program(function, [ProgramCall(tensors, {})], RngState.capture(()), training)
        [outcome] = program.run_all(modes=lambda _: entered, wide=wide)
        if outcome.error is not None:
            raise outcome.error
        return outcome.values

    reference = values(right)
    envelopes: dict[str, Envelope] = {}
    for seed in range(NOISE_RUNS):
        for name, sample in values(right, partial(MonteCarloMode, 1000 + seed)).items():
            if name in envelopes:
                envelopes[name].add(reference[name], sample)
            else:
                envelopes[name] = Envelope.of(reference[name], sample)
    wide = values(right, Float64Mode, wide=True), values(wrong, Float64Mode, wide=True)
    equivalent = all(
        name in wide[1] and root_mean_square(difference(one, wide[1][name])) <= EQUIVALENT * root_mean_square(one)
        for name, one in wide[0].items()
    )
    noise = {
        # noise never seen at an element is not noise that it cannot have, nor is that of rounding the result itself
        name: envelope.values.to(torch.float64)
        .clamp_min(envelope.rms)
        .clamp_min(unit_roundoff(reference[name].dtype) * root_mean_square(reference[name]))
        for name, envelope in envelopes.items()
    }
    return 0.0 if equivalent else _ratio(noise, *wide), _ratio(noise, reference, values(wrong))


def _ratio(noises: dict[str, torch.Tensor], right: dict[str, torch.Tensor], wrong: dict[str, torch.Tensor]) -> float:
    worst = 0.0
    for name, noise in noises.items():
        if name not in wrong or wrong[name].shape != right[name].shape:
            return float("inf")
        gap = difference(right[name], wrong[name]).to(torch.float64)
        ratios = torch.where(gap == 0, 0.0, gap / noise)
        worst = max(worst, float(ratios.nan_to_num(nan=torch.inf).max().item()) if ratios.numel() else 0.0)
    return worst
