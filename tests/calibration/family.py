"""What a family of programs is: a function of tensors in which bugs can be switched on, and its inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

_LOW = (torch.bfloat16, torch.float16)
_T = TypeVar("_T")


@dataclass(frozen=True)
class Plan:
    """Which bug is switched on while a program is traced.

    Attributes:
        dtype: The floating dtype of the program's inputs.
        active: The bug, as ``"class: detail"``; None for the correct program.
    """

    dtype: torch.dtype
    active: str | None = None

    def bug(self, name: str) -> bool:
        """Whether to make this mistake."""
        return self.active == name

    def pick(self, name: str, right: _T, wrong: _T) -> _T:
        """The right value, or the wrong one if that bug is on."""
        return wrong if self.bug(name) else right

    def up(self, x: torch.Tensor, name: str = "") -> torch.Tensor:
        """Cast half precision to float32, as careful programs do; with a name, forgetting it is a bug."""
        return x.to(torch.float32) if self.dtype in _LOW and not (name and self.bug(name)) else x

    def low(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """Pass a float32 tensor on; with the bug on, it is rounded to half precision on the way."""
        return x.to(torch.bfloat16).to(x.dtype) if self.dtype == torch.float32 and self.bug(name) else x

    def down(self, x: torch.Tensor) -> torch.Tensor:
        """Cast back to the program's own dtype."""
        return x.to(self.dtype)

    def one(self, x: torch.Tensor, name: str = "one element: the middle one is 1 % too large") -> torch.Tensor:
        """Pass a tensor on; with the bug on, one of its elements is wrong."""
        if not self.bug(name):
            return x
        flat = x.reshape(-1)
        place = torch.arange(flat.shape[0]) == flat.shape[0] // 2
        return torch.where(place, flat * 1.01, flat).reshape(x.shape)


@dataclass(frozen=True)
class _Listener(Plan):
    """Takes note of every bug that a program offers."""

    heard: list[str] = field(default_factory=list)

    def bug(self, name: str) -> bool:
        if name not in self.heard:
            self.heard.append(name)
        return False

    def low(self, x: torch.Tensor, name: str) -> torch.Tensor:
        if self.dtype == torch.float32:
            self.bug(name)
        return x

    def up(self, x: torch.Tensor, name: str = "") -> torch.Tensor:
        if name and self.dtype in _LOW:  # float32 programs cast nothing, so there is nothing to forget
            self.bug(name)
        return super().up(x)


@dataclass
class Maker:
    """Makes a program's inputs: the same for the same seed.

    Attributes:
        dtype: Of the floating tensors.
        trains: Whether floating tensors require grad, unless told otherwise.
        generator: Source of the random numbers.
    """

    dtype: torch.dtype
    trains: bool
    generator: torch.Generator

    def normal(self, *shape: int, scale: float = 1.0, shift: float = 0.0, grad: bool = True) -> torch.Tensor:
        values = torch.randn(*shape, generator=self.generator) * scale + shift
        return values.to(self.dtype).requires_grad_(self.trains and grad)

    def positive(self, *shape: int, low: float = 0.5, high: float = 1.5, grad: bool = True) -> torch.Tensor:
        values = torch.rand(*shape, generator=self.generator) * (high - low) + low
        return values.to(self.dtype).requires_grad_(self.trains and grad)

    def integers(self, high: int, *shape: int) -> torch.Tensor:
        """Integers from 0 up to, and without, ``high``."""
        return torch.randint(0, high, shape, generator=self.generator)


Body = Callable[..., Any]


@dataclass(frozen=True)
class Family:
    """A family of programs.

    Attributes:
        name: Its name.
        body: ``body(plan, *tensors)``: the program.
        inputs: Makes the tensors.
        trains: Whether its backward pass can be run.
        low: Whether it runs in half precision.
    """

    name: str
    body: Body
    inputs: Callable[[Maker], tuple[Any, ...]]
    trains: bool = True
    low: bool = True

    def make(self, dtype: torch.dtype, *, training: bool, seed: int = 0) -> tuple[Any, ...]:
        return self.inputs(Maker(dtype, training, torch.Generator().manual_seed(1000 * seed + 7)))

    def program(self, dtype: torch.dtype, bug: str | None = None) -> Callable[..., Any]:
        """The program as a function of its tensors, with one bug on, or none."""
        body, plan = self.body, Plan(dtype, bug)

        def run(*tensors: torch.Tensor) -> Any:
            return body(plan, *tensors)

        return run


def family(
    inputs: Callable[[Maker], tuple[Any, ...]], *, trains: bool = True, low: bool = True
) -> Callable[[Body], Family]:
    """Make a family of a function, under the function's name."""

    return lambda body: Family(body.__name__, body, inputs, trains=trains, low=low)


def bugs_of(subject: Family, dtype: torch.dtype) -> list[str]:
    """Every bug that can be switched on, in the order in which the program asks for them."""
    listener = _Listener(dtype)
    with torch.no_grad():
        subject.body(listener, *subject.make(dtype, training=False))
    return listener.heard
