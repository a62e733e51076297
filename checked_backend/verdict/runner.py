"""One run of a program under given conditions: its recipe, who makes it, and the runs that one check has made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Protocol, TypeVar

import torch

from checked_backend.errors import CheckedBackendError, is_out_of_memory
from checked_backend.findings import Skip
from checked_backend.verdict.decisions import Decisions

Values = dict[str, torch.Tensor]

Answer = TypeVar("Answer")

REMEMBERED_BYTES = 2**26
"""How much memory the tensors of remembered runs of eager may take. Beyond that a run that is asked for again is made
again."""


class Control(Enum):
    """The control runs, with what reports call them."""

    REPEAT = "repeated reference"
    BARE = "repeated reference, as it is"
    ONE_ZERO = "eager with one zero"
    MONTE_CARLO = "Monte Carlo arithmetic"
    SHAPES = "shapes under Monte Carlo arithmetic"
    FLOAT64 = "high-precision reference"
    FLOAT64_NOISE = "float64 noise"
    TWIN = "float64 twin"
    CANDIDATE_AGAIN = "candidate again"
    CANDIDATE_REPLAYED = "candidate on recorded random numbers"
    RECOMPILED = "candidate compiled once more"
    UNFUSED = "candidate that rounds where eager does"
    OTHER_THREADS = "looking for other threads"


class Build(Enum):
    """The builds of a program that can run."""

    EAGER = "eager"
    COMPILED = "compiled"
    TWIN = "compiled in float64"
    UNFUSED = "compiled so that it rounds wherever eager does"
    RECOMPILED = "compiled once more, like the float64 twin but at its own dtypes"


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to run a program once, from the random state before the call.

    Attributes:
        control: What reports call this run.
        build: The build that runs.
        replays_draws: Give it the random numbers that eager drew, as recorded.
        junk: What fills uninitialised memory, in a run that records eager's draws and choices. None: such a run is made
            first, if this one replays them. Without any of these nothing intercepts operators: some of torch's own code
            acts on an active dispatch mode.
        seed: Makes every rounding random; with a magnitude above 1, with correlated sums. None: rounds as it is.
        magnitude: The size of these roundings, in unit roundoffs.
        keeps_choices: Keep the choices (indices, comparisons, roundings to integers) that eager made without noise.
        negative_zero: Return this zero wherever an operator may return either; None: as it is.
        urgent: A tensor lies outside of its noise, so that the comparison must not be postponed.
        number: Tells runs apart that are made alike, to see whether they differ.
    """

    control: Control
    build: Build = Build.EAGER
    replays_draws: bool = False
    junk: int | None = None
    seed: int | None = None
    magnitude: float = 1.0
    keeps_choices: bool = False
    float64: bool = False
    negative_zero: bool | None = None
    urgent: bool = True
    number: int = 1

    @property
    def records_choices(self) -> bool:
        """Whether this run records eager's choices: it is the first at its precision."""
        return self.junk is not None or self.control is Control.FLOAT64


REPEAT = Recipe(Control.REPEAT, junk=1)
BARE = Recipe(Control.BARE)
FLOAT64 = Recipe(Control.FLOAT64, float64=True, replays_draws=True)


def monte_carlo(seed: int, magnitude: float = 1.0, *, keeps_choices: bool = False, float64: bool = False) -> Recipe:
    """Eager with every rounding made random; in float64 at float64's roundoffs."""
    return Recipe(
        Control.FLOAT64_NOISE if float64 else Control.MONTE_CARLO,
        replays_draws=True,
        seed=seed,
        magnitude=magnitude,
        keeps_choices=keeps_choices,
        float64=float64,
    )


@dataclass(slots=True)
class Facts:
    """What the runs so far have shown.

    Attributes:
        draws: Whether eager draws random numbers.
        draws_by_values: Operators of eager whose draws depend on computed values, so that rounding flips some draws.
        chooses: Whether eager makes choices by floating-point numbers: at its own precision (False), in float64 (True).
        flips: Where noise would have made another choice than the recorded one that was kept; by precision, too.
        written: Inputs that the program wrote to before its backward pass, which all runs start from as they are now.
        left_out: For each kind of run, operators whose results it could not perturb, or not compute in float64.
    """

    draws: bool = False
    draws_by_values: tuple[str, ...] = ()
    chooses: set[bool] = field(default_factory=set)
    flips: set[bool] = field(default_factory=set)
    written: tuple[str, ...] = ()
    left_out: dict[Control, set[str]] = field(
        default_factory=lambda: {Control.MONTE_CARLO: set(), Control.FLOAT64: set()}
    )


class MadeElsewhereError(CheckedBackendError):
    """Raised for a control run that another check of the same program makes."""


class PostponedError(CheckedBackendError):
    """Raised for a control run that has not been earned yet (option ``budget``). The values are compared later."""


class Runner(Protocol):
    """Runs a program. Any method may raise; the check then does without that run."""

    @property
    def facts(self) -> Facts:
        """What the runs so far have shown."""

    def run(self, recipe: Recipe) -> Values | None:
        """Run it once. None if the program cannot be built in that way.

        Raises:
            PostponedError: The comparison is postponed.
            MadeElsewhereError: Another check of the same program makes this run.
        """

    def others_drew(self) -> str | None:
        """Evidence that another thread drew random numbers during the checked call; None if there is none."""


class Runs:
    """The runs that one check has made, and those that could not be made.

    Args:
        decisions: Receives a skip for each control that could not run.

    Attributes:
        missing: For each control that could not run, the reason.
        elsewhere: Controls that another check of the same program makes.
        short_of_memory: Controls that could not run for want of memory.
    """

    def __init__(self, runner: Runner, decisions: Decisions) -> None:
        self.runner = runner
        self.missing: dict[Control, str] = {}
        self.elsewhere: set[Control] = set()
        self.short_of_memory: set[Control] = set()
        self._decisions = decisions
        self._made: dict[Recipe, Values | None] = {}
        self._room = REMEMBERED_BYTES

    def run(self, recipe: Recipe) -> Values | None:
        """What came out of a run, made now or before; None if it could not be made.

        Raises:
            PostponedError: The comparison is postponed until the run is earned.
        """
        if recipe.keeps_choices and recipe.float64 not in self.runner.facts.chooses:
            recipe = replace(recipe, keeps_choices=False)
        if recipe not in self._made:
            values = self.ask(recipe.control, lambda: self.runner.run(recipe))
            size = sum(value.numel() * value.element_size() for value in (values or {}).values())
            if recipe.build is Build.EAGER and size > self._room:
                return values
            self._room -= size
            self._made[recipe] = values
        return self._made[recipe]

    def ask(self, control: Control, question: Callable[[], Answer | None]) -> Answer | None:
        """The answer to a question that needs runs; None if they could not be made, or show nothing.

        Raises:
            PostponedError: The comparison is postponed until the run is earned.
        """
        try:
            return question()
        except MadeElsewhereError:
            self.elsewhere.add(control)
            return None
        except PostponedError:
            raise
        except Exception as error:  # recorded: a control that could not run is in the coverage
            why = short(error)
            if is_out_of_memory(error):
                self.short_of_memory.add(control)
            self.missing[control] = why
            skip = Skip(f"control: {control.value}", why)
            if skip not in self._decisions.skips:
                self._decisions.skips.append(skip)
            return None


def short(error: BaseException) -> str:
    """An exception in one line, marked as such if it is for want of memory."""
    lines = str(error).strip().splitlines()
    told = f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
    return f"unsupported: memory: {told}" if is_out_of_memory(error) else told
