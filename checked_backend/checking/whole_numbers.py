"""Inputs of which nothing has to be rounded: a candidate that is off on these is wrong, whatever its noise would hide.

Where a reference only adds, multiplies, moves, masks and compares, small whole numbers make each partial result exact,
in whatever order it is computed. A result that is off by half or more is then no rounding, not even by a formula that
rounds where the reference does not. A dropped element of a long sum shows, which the noise of 16 bits would hide.
Whole numbers are often equal. So nothing that chooses among equal numbers is asked, nor the slope where a function has
a kink.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch

from checked_backend._torch.operators import OpOverload
from checked_backend._torch.pytree import tree_map
from checked_backend.checking.backward import roots_of
from checked_backend.checking.program import Outcome, Program, ProgramCall, ProgramCopy
from checked_backend.checking.variants import OF_VALUES, substituted
from checked_backend.findings import Finding, Kind, Skip
from checked_backend.graphs.operators import Operator, OperatorKind
from checked_backend.modes.base import OperatorMode, tensors_in
from checked_backend.numerics.measure import measure
from checked_backend.report.ledger import Ledger

SHARES = (1.0, 1 / 4, 1 / 16, 1 / 256, 1 / 4096, 0.0)
"""Shares of numbers that are not 0, beside those in the corners: the first with which all sums are exact is taken."""

_MOVING = frozenset({OperatorKind.EXACT, OperatorKind.UNINITIALISED})
_ADDING_NAMES = """
    add sub rsub mul square addcmul sum cumsum dot mv addmv mm bmm addmm baddbmm convolution convolution_backward
    index_add scatter_add index_put embedding_dense_backward
"""
_ADDING = frozenset(_ADDING_NAMES.split())
_CHOOSING = frozenset({"sort", "topk", "kthvalue", "median", "nanmedian", "mode", "argsort", "argmax", "argmin"})
_KINKED_NAMES = """
    abs sgn relu relu6 hardtanh clamp clamp_min clamp_max threshold max min amax amin maximum minimum fmax fmin cummax
    cummin max_pool1d max_pool2d max_pool3d max_pool2d_with_indices max_pool3d_with_indices adaptive_max_pool2d
    adaptive_max_pool3d eq ne lt le gt ge
"""
_KINKED = frozenset(_KINKED_NAMES.split())
_LABEL = "on whole numbers, of which nothing has to be rounded"


class ExactMode(OperatorMode):
    """Sees whether a program rounds anything.

    Attributes:
        rounds: The first operator that rounds, or that may add up more than its dtype can count; or "".
        is_full: Whether it is the latter.
        has_kinks: Whether a gradient depends on how equal numbers are taken.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rounds = ""
        self.is_full = False
        self.has_kinks = False

    def run(self, func: OpOverload, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator, and bound the sum of its terms' magnitudes."""
        self.has_kinks |= operator.base in _KINKED
        if operator.base in _CHOOSING:
            self.rounds = self.rounds or f"{operator.name}, which chooses among equal numbers"
        if self.rounds or operator.kind in _MOVING:
            return func(*args, **kwargs)
        adds = operator.base in _ADDING and func.namespace == "aten"
        bounds = _of_magnitudes(func, args, kwargs) if adds else ()
        result = func(*args, **kwargs)
        results = [*tensors_in(result)]
        floats = [one for one in results if one.is_floating_point()]
        # up to here a unit in the last place is a half at most
        most = min((0.5 / torch.finfo(one.dtype).eps for one in floats), default=math.inf)
        known = adds or operator.kind is OperatorKind.NARROWING
        if not known or not all(_is_whole(one, most) for one in (*results, *tensors_in(bounds))):
            self.rounds, self.is_full = operator.name, known
        return result

    def opaque(self, name: str) -> None:
        """An operator without operators inside: it may do anything."""
        self.rounds = self.rounds or name


def _of_magnitudes(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What an operator makes of the magnitudes of its arguments, in float64: no partial result of it is greater."""

    def magnitude(value: Any) -> Any:
        is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.detach().abs().double() if is_float else value

    return func(*tree_map(magnitude, args), **kwargs)


def _is_whole(tensor: torch.Tensor, most: float) -> bool:
    """Whether all numbers of a tensor are whole, and so small that all that are smaller have a representation."""
    if not tensor.is_floating_point() or not tensor.numel():
        return not tensor.is_complex()
    return bool((tensor == tensor.round()).all()) and float(tensor.abs().max()) <= most


def on_whole_numbers(program: Program, ledger: Ledger) -> ProgramCall | None:
    """The program's own call on whole numbers, with gradients that are whole too; None if eager rounds something."""
    for share in SHARES:
        generator = torch.Generator().manual_seed(0)
        tensors = {
            name: _whole(leaf, share, generator)
            for name, leaf in program.tensors().items()
            if leaf.is_floating_point() and leaf.layout is torch.strided
        }
        made = substituted(program, tensors, _LABEL)
        if made is None:
            return None
        plain = ProgramCopy(program).step(0, replace(made, entering={}))
        entering = {
            name: _whole(root, share, generator)
            for name, root in roots_of(plain.outputs, refusing=False).items()
            if root.is_floating_point() and root.layout is torch.strided
        }
        made = replace(made, entering=entering, is_exact=True)
        mode = ExactMode()
        outcome = ProgramCopy(program, modes=partial(_under, mode)).step(0, made)
        if outcome.error is None and not mode.rounds:
            return replace(made, entering={}) if mode.has_kinks else made
        if not mode.is_full:
            break
    why = f"the reference rounds ({mode.rounds})" if mode.rounds else "the reference raises an exception on them"
    ledger.skip(Skip(_LABEL, why))
    return None


def _under(mode: ExactMode, _number: int) -> list[ExactMode]:
    return [mode]


def _whole(tensor: torch.Tensor, share: float, generator: torch.Generator) -> torch.Tensor:
    """Numbers -1, 0 and 1 in the place of a tensor's own. Those in the corners are not 0."""
    signs = torch.randint(0, 2, tensor.shape, generator=generator) * 2 - 1
    kept = torch.rand(tensor.shape, generator=generator) < share
    if tensor.numel():
        for corner in product((0, -1), repeat=tensor.dim()):
            kept[corner] = True
    whole = torch.empty_like(tensor.detach()).copy_(signs * kept)
    return whole.requires_grad_(tensor.requires_grad)


def beyond_rounding(findings: Sequence[Finding], reference: Outcome, candidate: Outcome) -> list[Finding]:
    """The findings of a call on whole numbers: floating-point values are only wrong if they are off by half or more."""
    floats = {name: value for name, value in reference.values.items() if value.is_floating_point()}
    beyond = [name for name, value in floats.items() if _is_beyond(value, candidate.values.get(name))]
    within = floats.keys() - beyond
    found = [one for one in findings if one.kind not in OF_VALUES or one.subject not in within]
    for name in beyond:
        if all(one.subject != name for one in found):
            metrics = measure(reference=reference.values[name], candidate=candidate.values[name])
            found.append(Finding(Kind.LOGIC, name, "it is off by half or more", "logic", metrics=metrics))
    return found


def _is_beyond(expected: torch.Tensor, actual: torch.Tensor | None) -> bool:
    if actual is None or actual.shape != expected.shape or actual.is_complex():
        return False
    one, other = expected.double(), actual.double()
    near = (one == other) | (one.isnan() & other.isnan()) | ((one - other).abs() < 0.5)
    return not bool(near.all())
