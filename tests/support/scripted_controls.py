"""Control runs that give what a test says, and what the verdict makes of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from checked_backend.findings import Kind
from checked_backend.verdict.decide import decide
from checked_backend.verdict.decisions import Decisions, TensorPair
from checked_backend.verdict.envelope import NoiseBaseline
from checked_backend.verdict.runner import Control, Facts, Recipe, Runner, Values

Make = Callable[[], torch.Tensor]


class MissingError(Exception):
    """What a control raises that cannot run."""


def missing() -> torch.Tensor:
    raise MissingError("not here")


@dataclass
class Scripted:
    """Runs that return what a test says, and count how often each is asked.

    Attributes:
        dtype: Of the program.
        right: The exact result.
        twin_value: What the twin computes.
        again: What eager gives when it runs again.
        left_alone: The same without any mode, where that is another.
        replayed: What the candidate gives on recorded random numbers.
        alone: What it gives when it runs again.
        recompiled_value: What it gives when it is compiled once more; None if it cannot be.
        unfused_value: What it gives when it rounds wherever eager does; None if its compiler cannot.
        others: What shows that another thread drew random numbers.
        jumps: In which float64 control runs the result jumps.
        jump: By how much.
        drift: By how much float64 differs from run to run.
        lost: Runs that cannot be made.
        written: Inputs that were written to before these runs.
        blind_spots: Operators that control runs left out.
        asked: How often each control was asked.
    """

    dtype: torch.dtype
    right: torch.Tensor
    twin_value: Make
    again: Make | None = None
    left_alone: Make | None = None
    replayed: Make | None = None
    alone: Make | None = None
    recompiled_value: Make | None = None
    unfused_value: Make | None = None
    others: str | None = None
    jumps: tuple[int, ...] = ()
    jump: float = 1.0
    drift: float = 0.0
    lost: tuple[str, ...] = ()
    written: tuple[str, ...] = ()
    noise: float = 1.0
    blind_spots: Mapping[Control, set[str]] = field(default_factory=dict)
    asked: dict[str, int] = field(default_factory=dict)

    def run(self, recipe: Recipe) -> Values | None:
        name = recipe.control.name.lower()
        if recipe.control is Control.MONTE_CARLO:
            return self._give(name, lambda: self._noisy(recipe.seed or 0, recipe.magnitude))
        if recipe.control is Control.FLOAT64:
            return self._give(name, lambda: self.right + self.drift * self.asked[name])
        if recipe.control is Control.FLOAT64_NOISE:
            return self._give(name, lambda: self.right + (self.jump if recipe.seed in self.jumps else 1e-16))
        eager = self.again or (lambda: self._own(self.right))
        makes: Mapping[Control, Make | None] = {
            Control.REPEAT: eager,
            Control.BARE: self.left_alone or eager,
            Control.CANDIDATE_REPLAYED: self.replayed or missing,
            Control.CANDIDATE_AGAIN: self.alone or missing,
            Control.TWIN: self.twin_value,
            Control.RECOMPILED: self.recompiled_value,
            Control.UNFUSED: self.unfused_value,
            Control.ONE_ZERO: missing,
        }
        make = makes[recipe.control]
        return None if make is None else self._give(name, make)

    @property
    def facts(self) -> Facts:
        return Facts(draws=self.replayed is not None, written=self.written, left_out={**self.blind_spots})

    def others_drew(self) -> str | None:
        return self.others

    def _give(self, name: str, make: Make) -> Values:
        self.asked[name] = self.asked.get(name, 0) + 1
        if name in self.lost:
            raise MissingError("not here")
        return {"output[0]": make()}

    def _own(self, value: torch.Tensor) -> torch.Tensor:
        return value.to(self.dtype)

    def _noisy(self, seed: int, magnitude: float) -> torch.Tensor:
        xi = torch.rand(self.right.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        roundoff = torch.finfo(self.dtype if self.dtype.is_floating_point else torch.float32).eps / 2
        return self._own(self.right * (1 + self.noise * magnitude * roundoff * (2 * xi - 1)))


def exact() -> torch.Tensor:
    return torch.linspace(1, 2, 64, dtype=torch.float64)


def decided(
    controls: Scripted,
    candidate: torch.Tensor,
    *,
    kind: Kind | None = None,
    known: dict[str, NoiseBaseline] | None = None,
    thorough: bool = True,
    low_precision: bool | None = None,
    reference: torch.Tensor | None = None,
) -> Decisions:
    given = controls.right.to(controls.dtype) if reference is None else reference
    low = controls.dtype in (torch.bfloat16, torch.float16) if low_precision is None else low_precision
    pair = TensorPair("output[0]", "output[0]", given, candidate.to(controls.dtype), kind, "")
    made: Runner = controls
    return decide([pair], lambda: made, {} if known is None else known, thorough=thorough, low_precision=low)


def fused() -> torch.Tensor:
    """Beyond the noise of `exact`, and further from float64 than eager."""
    return exact() * (1 + 2.0**-4)
