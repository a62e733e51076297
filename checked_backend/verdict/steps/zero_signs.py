"""Find zeros that are handed out with another sign than eager's. ``1 / x`` tells them apart, a difference does not.

Most signs of zeros come from rounding: terms cancel, or a value is too small for its dtype. A sign that eager keeps
under Monte Carlo arithmetic and in float64, and that no maximum of two zeros made, is part of the program's meaning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from checked_backend.findings import Finding, Kind
from checked_backend.verdict import thresholds
from checked_backend.verdict.decisions import Decisions, TensorPair
from checked_backend.verdict.runner import FLOAT64, REPEAT, Control, Recipe, Runs, Values, monte_carlo
from checked_backend.verdict.steps.candidate_again import ON_EAGERS_DRAWS


def zeros_of_another_sign(
    pairs: Sequence[TensorPair], runs: Callable[[], Runs], decisions: Decisions
) -> Iterator[Finding]:
    """Find zeros whose sign is not eager's, and not noise.

    Args:
        pairs: Tensors that are handed out. Pairs with a kind of their own (changed inputs) are left out: nobody asks
            for the sign of a zero that is summed up.
        runs: Gives what makes control runs; called only if a sign differs.
        decisions: Tensors with findings in it are left out.
    """
    differing = {finding.subject for finding in decisions.findings}
    handed_out = [pair for pair in pairs if pair.kind is None and pair.subject not in differing]
    doubtful = [(pair, turned) for pair in handed_out if (turned := _turned(pair)) is not None]
    if not doubtful:
        return
    recipes = [
        REPEAT,
        *(monte_carlo(seed) for seed in range(thresholds.FIRST_RUNS)),
        *(Recipe(Control.ONE_ZERO, replays_draws=True, negative_zero=negative) for negative in (False, True)),
        FLOAT64,
    ]
    made = [*map(runs().run, recipes)]
    # the compiled program may have drawn otherwise, because a value that it draws by is rounded otherwise
    on_eagers = runs().run(ON_EAGERS_DRAWS) if runs().runner.facts.draws_by_values else None
    for pair, turned in doubtful:
        left = _kept_by_all(pair.reference, pair, turned, made)
        if on_eagers is not None:
            left = _kept_by_all(pair.candidate, pair, left, [on_eagers])
        if bool(left.any()):
            yield _finding(pair, left)


def _turned(pair: TensorPair) -> torch.Tensor | None:
    """A mask of elements that are zeros of different signs; None if there are none."""
    reference, candidate = _parts(pair.reference), _parts(pair.candidate)
    for one in (reference, candidate):
        if not one.is_floating_point() or one.dtype.itemsize < 2 or one.layout is not torch.strided or not one.numel():
            return None
    if reference.dtype != candidate.dtype or reference.device != candidate.device or reference.shape != candidate.shape:
        return None
    zeros = (reference == 0) & (candidate == 0)
    if not bool(zeros.any()):
        return None
    zeros &= reference.signbit() != candidate.signbit()
    return zeros if bool(zeros.any()) else None


def _kept_by_all(
    zeros: torch.Tensor, pair: TensorPair, turned: torch.Tensor, made: Sequence[Values | None]
) -> torch.Tensor:
    """The elements, of these, with the sign of these zeros in every control run; none if a run could not be made."""
    sign = _parts(zeros).signbit()
    for values in made:
        value = None if values is None else values.get(pair.name)
        found = None if value is None else _parts(value)
        if found is None or found.shape != turned.shape:
            return torch.zeros_like(turned)
        turned = turned & (found == 0) & (found.signbit() == sign)
    return turned


def _parts(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of real numbers. Complex numbers become real and imaginary parts, in a last dimension of two."""
    plain = tensor.detach()
    if not plain.is_complex() or plain.layout is not torch.strided:
        return plain
    return torch.view_as_real(plain.resolve_conj())


def _finding(pair: TensorPair, where: torch.Tensor) -> Finding:
    place = tuple(where.nonzero()[0].tolist())
    count = int(where.sum())
    parts = "real and imaginary parts" if pair.reference.is_complex() else "elements"
    message = (
        f"{count} of its {where.numel()} {parts}: zeros of another sign than eager's, which rounding does not change "
        "and float64 confirms; 1 / x, atan2 and signbit tell the two apart"
    )
    expected, actual = (f"{float(_parts(one)[place])} at {list(place)}" for one in (pair.reference, pair.candidate))
    detail, source = "logic.sign_of_zero", pair.source or None
    return Finding(Kind.LOGIC, pair.subject, message, detail, expected=expected, actual=actual, source=source)
