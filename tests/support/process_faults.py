"""Compilers that crash, draw other random numbers, or leave the process another than they found it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import fx

from tests.support.operator_faults import wrong_operator
from tests.support.planting import (
    Compiler,
    compiled_by_aot,
    run_in_python,
    through_aot,
)
from tests.support.spoiling import (
    How,
    PlantedError,
    Spoil,
    changed,
    raising,
)

__all__ = [
    "crash_in_backward",
    "crash_when_compiling",
    "crash_when_running",
    "dies_on",
    "leaves_setting",
    "other_random_numbers",
    "reseeded",
    "too_many_random_numbers",
]


# crashes


def crash_when_compiling(how: How = "python") -> Compiler:
    """The compiler raises."""

    crash = raising("the compiler crashed")
    return compiled_by_aot(forward=crash) if how == "aot" else crash


def crash_when_running(how: How = "python") -> Compiler:
    """The compiled region raises."""
    edit = raising("the compiled region crashed")
    return compiled_by_aot(forward=lambda _gm: edit) if how == "aot" else run_in_python(lambda _gm: edit)


def crash_in_backward(when: Literal["compiling", "running"] = "running") -> Compiler:
    """The compiled backward graph raises, or its compiler does."""
    if when == "running":
        return compiled_by_aot(backward=lambda _gm: raising("the compiled backward crashed"))
    return compiled_by_aot(backward=raising("the backward's compiler crashed"))


def dies_on(condition: Callable[[fx.GraphModule], bool], name: str, spoil: Spoil = changed) -> Compiler:
    """As `wrong_operator` on AOT autograd's graphs; the process dies where a graph fulfils a condition."""
    faulty = wrong_operator(name, spoil)

    def compiler(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        if condition(gm):
            os.kill(os.getpid(), signal.SIGUSR1)  # quieter than os.abort
        return faulty(gm, example_inputs)

    return through_aot(compiler)


# random numbers


def too_many_random_numbers(how: How = "python") -> Compiler:
    """One random number is drawn after the region has run: its values are right, the state it leaves is not."""

    def edit(results: list[Any], _args: Sequence[Any]) -> Any:
        torch.rand(())
        return tuple(results)

    return compiled_by_aot(forward=lambda _gm: edit) if how == "aot" else run_in_python(lambda _gm: edit)


def reseeded(how: How = "python") -> Compiler:
    """The region seeds torch's random generator when it has run."""

    def edit(results: list[Any], _args: Sequence[Any]) -> Any:
        torch.manual_seed(1234)
        return tuple(results)

    return compiled_by_aot(forward=lambda _gm: edit) if how == "aot" else run_in_python(lambda _gm: edit)


def other_random_numbers(how: How = "python") -> Compiler:
    """The region draws from a stream of its own: its dropout mask is another one, and torch's state does not move."""

    def around(run: Callable[..., Any]) -> Callable[..., Any]:
        def elsewhere(*args: Any) -> Any:
            with torch.random.fork_rng(devices=()):
                torch.manual_seed(987)
                return run(*args)

        return elsewhere

    if how == "aot":
        return compiled_by_aot(around=around)
    return lambda gm, _example_inputs: around(gm.forward)


# how it is done


def leaves_setting(
    change: Callable[[], object], when: Literal["compiling", "running", "raising", "backward"] = "running"
) -> Compiler:
    """Changes a setting of the process and does not set it back."""

    def then(outputs: Any) -> Any:
        change()
        if when == "raising":
            raise PlantedError("after a setting was changed")
        return outputs

    if when == "backward":
        return compiled_by_aot(backward=lambda _gm: lambda outputs, _inputs: then(outputs))

    def compiler(gm: fx.GraphModule, _example_inputs: Sequence[Any]) -> Callable[..., Any]:
        if when == "compiling":
            change()
            return gm.forward
        return lambda *args: then(gm.forward(*args))

    return compiler
