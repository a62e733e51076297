"""Compilers whose programs are wrong in some of their calls, or keep what a call was given or has returned."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from tests.support.planting import Compiler

__all__ = [
    "forgets_to_count",
    "from_call",
    "only_in_call",
    "remembers_by_address",
    "remembers_its_first_results",
    "same_memory_for_all_calls",
    "writes_to_earlier_inputs",
]


def from_call(first: int, faulty: Compiler) -> Compiler:
    """A compiler whose programs are right until a call of them, counted from 1, and wrong from that one on."""

    def compiler(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        wrong, number = faulty(gm, example_inputs), itertools.count(1)
        return lambda *args: wrong(*args) if next(number) >= first else gm.forward(*args)

    return compiler


def only_in_call(number: int, faulty: Compiler) -> Compiler:
    """A compiler whose programs are wrong in one call of them, counted from 1, and right before and after it."""

    def compiler(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        wrong, calls = faulty(gm, example_inputs), itertools.count(1)
        return lambda *args: wrong(*args) if next(calls) == number else gm.forward(*args)

    return compiler


def same_memory_for_all_calls(gm: fx.GraphModule, _example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """A compiler whose programs return the results of all calls in the same memory."""
    kept: list[torch.Tensor] = []

    def run(*args: Any) -> Any:
        results = gm.forward(*args)
        if not kept:
            kept.extend(torch.empty_like(result) for result in results)
        return [memory.copy_(result) for memory, result in zip(kept, results, strict=True)]

    return run


def remembers_its_first_results(gm: fx.GraphModule, _example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """A compiler whose programs return copies of the first call's results, whatever they are given."""
    kept: list[torch.Tensor] = []

    def run(*args: Any) -> Any:
        if not kept:
            kept.extend(result.clone() for result in gm.forward(*args))
        return [result.clone() for result in kept]

    return run


def writes_to_earlier_inputs(gm: fx.GraphModule, _example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """A compiler whose programs add 1 to what the call before was given."""
    before: list[torch.Tensor] = []

    def run(*args: Any) -> Any:
        for tensor in before:
            tensor.add_(1)
        before[:] = [arg for arg in args if isinstance(arg, torch.Tensor) and arg.is_floating_point()]
        return gm.forward(*args)

    return run


def remembers_by_address(gm: fx.GraphModule, _example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """A compiler whose programs remember their results by the addresses of what they are given."""
    kept: dict[tuple[int, ...], list[torch.Tensor]] = {}

    def run(*args: Any) -> Any:
        key = tuple(arg.data_ptr() for arg in args if isinstance(arg, torch.Tensor))
        if key not in kept:
            kept[key] = [result.clone() for result in gm.forward(*args)]
        return [result.clone() for result in kept[key]]

    return run


def forgets_to_count(gm: fx.GraphModule, _example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """A compiler whose programs write to their inputs as if through raw memory: no write is counted."""

    def run(*args: Any) -> Any:
        given = [arg for arg in args if isinstance(arg, torch.Tensor)]
        before = [0 if tensor.is_inference() else tensor._version for tensor in given]
        results = gm.forward(*args)
        counted = [(tensor, count) for tensor, count in zip(given, before, strict=True) if not tensor.is_inference()]
        torch._C._autograd._unsafe_set_version_counter(
            tuple(tensor for tensor, _ in counted), tuple(count for _, count in counted)
        )
        return results

    return run
