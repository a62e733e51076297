"""Compilers that are wrong on purpose, one for each class of miscompile.

Each function here makes a compiler ``(gm, example_inputs) -> callable`` for ``options={"compiler": ...}`` or
``cb.check(compiler=...)``. Most come in two variants:

- ``how="python"``: the region runs as it is, and what it returns, or an input's gradient, is spoiled in Python. The
  region's backward pass then consists of torch's own autograd nodes.
- ``how="aot"``: the region goes through AOT autograd, and the compiled forward or backward graph is spoiled. The region
  then is one autograd node, as under Inductor.

`clean` makes the same compilers with nothing spoiled. Inputs are named by the end of the user's name for them
(``"layers.0.weight"``), outputs by their number.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from tests.support.call_faults import (
    from_call,
    only_in_call,
    remembers_by_address,
    remembers_its_first_results,
    same_memory_for_all_calls,
    writes_to_earlier_inputs,
)
from tests.support.operator_faults import (
    left_out,
    refuses,
    wrong_for_readers,
    wrong_if_compiled_together,
    wrong_if_fused,
    wrong_if_symbolic,
    wrong_if_unseen,
    wrong_operator,
)
from tests.support.planting import (
    Compiler,
    Edit,
    MutatedInputs,
    SpoilGradient,
    compiled_by_aot,
    input_position,
    run_in_python,
)
from tests.support.process_faults import (
    crash_in_backward,
    crash_when_compiling,
    crash_when_running,
    dies_on,
    leaves_setting,
    other_random_numbers,
    reseeded,
    too_many_random_numbers,
)
from tests.support.spoiling import (
    How,
    PlantedError,
    Spoil,
    changed,
    one_element_changed,
    replaced,
    restrided,
    with_nan,
)

__all__ = [
    "Compiler",
    "How",
    "PlantedError",
    "changed",
    "clean",
    "crash_in_backward",
    "crash_when_compiling",
    "crash_when_running",
    "dies_on",
    "dropped_mutation",
    "extra_output",
    "from_call",
    "leaves_setting",
    "left_out",
    "lost_alias",
    "made_nan",
    "missing_output",
    "not_a_function",
    "on_data",
    "once",
    "one_element",
    "one_element_changed",
    "only_in_call",
    "other_random_numbers",
    "overwritten_cotangent",
    "refuses",
    "remembers_by_address",
    "remembers_its_first_results",
    "reseeded",
    "restrided",
    "returns_none",
    "same_memory_for_all_calls",
    "scaled_gradient",
    "spoiled_gradient",
    "spoiled_output",
    "spoiled_tangents",
    "too_many_random_numbers",
    "unwanted_mutation",
    "with_nan",
    "writes_to_earlier_inputs",
    "wrong_dtype",
    "wrong_for_readers",
    "wrong_if_compiled_together",
    "wrong_if_fused",
    "wrong_if_symbolic",
    "wrong_if_unseen",
    "wrong_mutation",
    "wrong_operator",
    "wrong_shape",
    "wrong_stride",
    "wrong_value",
    "zeroed_gradient",
]


def clean(how: How = "python") -> Compiler:
    """A compiler without a fault, built as the wrong ones are."""
    if how == "aot":
        return compiled_by_aot()
    return lambda gm, _example_inputs: gm.forward


def once(number: int, spoil: Spoil) -> Spoil:
    """Spoils a tensor the n-th time only, counted from 1."""
    times = itertools.count(1)
    return lambda tensor: spoil(tensor) if next(times) == number else tensor


def on_data(condition: Callable[[Sequence[Any]], bool], faulty: Compiler) -> Compiler:
    """A compiler whose programs are wrong for the arguments of which a condition is true, and right for others."""

    def compiler(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        wrong = faulty(gm, example_inputs)
        return lambda *args: wrong(*args) if condition(args) else gm.forward(*args)

    return compiler


# gradients that enter


def spoiled_tangents(spoil: Spoil) -> Compiler:
    """The backward pass sees other gradients of the region's outputs than those that arrive, in whatever layout."""

    def edit(_gm: fx.GraphModule) -> Edit:
        return lambda results, _args: tuple(
            SpoilGradient.apply(value, spoil) if isinstance(value, torch.Tensor) and value.requires_grad else value
            for value in results
        )

    return run_in_python(edit)


# outputs


def spoiled_output(spoil: Spoil, at: int = 0, how: How = "python") -> Compiler:
    """Replace one output with what ``spoil`` makes of it.

    Args:
        spoil: Takes the right tensor, returns the wrong one.
        at: Number of the region's output.
        how: ``"python"``: after the region has run; ``"aot"``: in the compiled forward graph.
    """
    if how == "aot":
        mutated = MutatedInputs()
        return compiled_by_aot(forward=lambda gm: replaced(at + len(mutated.of(gm)), spoil))
    return run_in_python(lambda _gm: replaced(at, spoil))


def wrong_value(at: int = 0, how: How = "python") -> Compiler:
    """Every element of an output is wrong."""
    return spoiled_output(changed, at, how)


def one_element(at: int = 0, how: How = "python") -> Compiler:
    """One element of an output is wrong."""
    return spoiled_output(one_element_changed, at, how)


def wrong_dtype(at: int = 0, how: How = "python") -> Compiler:
    """An output is in float64."""
    return spoiled_output(lambda tensor: tensor.double(), at, how)


def wrong_shape(at: int = 0, how: How = "python") -> Compiler:
    """An output has a dimension too many."""
    return spoiled_output(lambda tensor: tensor.unsqueeze(0), at, how)


def wrong_stride(at: int = 0, how: How = "python") -> Compiler:
    """An output of two or more dimensions is laid out in another order."""
    return spoiled_output(restrided, at, how)


def made_nan(at: int = 0, how: How = "python") -> Compiler:
    """An output has a NaN that eager does not have."""
    return spoiled_output(with_nan, at, how)


def lost_alias(at: int = 0) -> Compiler:
    """An output that shares memory with an input, or with another output, is a copy.

    AOT autograd makes such outputs anew after the compiled graph, so a compiled graph cannot lose them.
    """
    return spoiled_output(lambda tensor: tensor.clone(), at)


def missing_output() -> Compiler:
    """The last output is not returned."""
    return run_in_python(lambda _gm: lambda results, _args: tuple(results[:-1]))


def extra_output() -> Compiler:
    """The first output is returned once more, at the end."""
    return run_in_python(lambda _gm: lambda results, _args: (*results, results[0]))


def returns_none() -> Compiler:
    """The compiled region returns None."""
    return run_in_python(lambda _gm: lambda _results, _args: None)


def not_a_function() -> Compiler:
    """The compiler itself returns None: its author forgot the ``return``."""

    def compiler(gm: fx.GraphModule, _example_inputs: Sequence[Any]) -> Any:
        gm.graph.lint()

    return compiler


# mutations


def dropped_mutation(name: str, how: How = "python") -> Compiler:
    """An input is not changed in place, though it should be."""
    if how == "aot":
        return _spoiled_mutation(name, lambda _new, old: old)

    def compiler(gm: fx.GraphModule, _example_inputs: Sequence[Any]) -> Callable[..., Any]:
        place = input_position(gm, name)

        def run(*args: Any) -> Any:
            return gm.forward(*args[:place], args[place].clone(), *args[place + 1 :])

        return run

    return compiler


def wrong_mutation(name: str, how: How = "python") -> Compiler:
    """An input is changed in place, to wrong values."""
    if how == "aot":
        return _spoiled_mutation(name, lambda new, _old: changed(new))
    return unwanted_mutation(name)


def unwanted_mutation(name: str) -> Compiler:
    """An input is changed in place after the region has run; for inputs that the region should leave alone."""

    def compiler(gm: fx.GraphModule, _example_inputs: Sequence[Any]) -> Callable[..., Any]:
        place = input_position(gm, name)

        def run(*args: Any) -> Any:
            results = gm.forward(*args)
            # .data: as compiled code does, and unlike torch operators, this tells autograd nothing
            args[place].data.copy_(changed(args[place].data))
            return results

        return run

    return compiler


# gradients


def spoiled_gradient(name: str, spoil: Spoil, how: How = "python") -> Compiler:
    """Replace the gradient that the region sends to one input with what ``spoil`` makes of it."""
    if how == "aot":
        return compiled_by_aot(backward=lambda gm: replaced(input_position(gm, name), spoil))

    def compiler(gm: fx.GraphModule, _example_inputs: Sequence[Any]) -> Callable[..., Any]:
        place = input_position(gm, name)

        def run(*args: Any) -> Any:
            return gm.forward(*args[:place], SpoilGradient.apply(args[place], spoil), *args[place + 1 :])

        return run

    return compiler


class _Overwriting(torch.autograd.Function):
    """The identity, whose backward pass writes to the gradient that it is given."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        right = gradient.clone()
        gradient.zero_()
        return right


def overwritten_cotangent() -> Compiler:
    """The gradient that arrives at the first output is overwritten; what leaves the region is right."""
    return spoiled_output(lambda tensor: _Overwriting.apply(tensor))  # type: ignore[no-untyped-call]


def zeroed_gradient(name: str, how: How = "python") -> Compiler:
    """An input's gradient is zero."""
    return spoiled_gradient(name, torch.zeros_like, how)


def scaled_gradient(name: str, how: How = "python", factor: float = 1.01) -> Compiler:
    """An input's gradient is one percent too large."""
    return spoiled_gradient(name, lambda gradient: gradient * factor, how)


def _spoiled_mutation(name: str, spoil: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Compiler:
    """An AOT forward graph that returns ``spoil(new, old)`` for the new value of a mutated input."""
    mutated = MutatedInputs()

    def forward(gm: fx.GraphModule) -> Edit:
        position = input_position(gm, name)
        place = mutated.of(gm).index(position)

        def edit(results: list[Any], args: Sequence[Any]) -> Any:
            results[place] = spoil(results[place], args[position])
            return tuple(results)

        return edit

    return compiled_by_aot(forward=forward)
