"""`check` on programs whose results and arguments lie in containers of every kind."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import numpy as np
import pytest
import torch
from transformers.modeling_outputs import BaseModelOutput

import checked_backend as cb
from tests.support import faults
from tests.support.check_tools import Holder, Pair, Record, agreed, batch, found, only


def an_object(x: torch.Tensor) -> Holder:
    holder = Holder.__new__(Holder)
    holder.tensor = x * 2
    return holder


@pytest.mark.parametrize(
    ("function", "subject"),
    [
        (lambda x: Record(x * 2, Pair(x + 1, [x.sin(), (x.cos(), None)])), "output.rest.right[0]"),
        (
            lambda x: BaseModelOutput(last_hidden_state=x * 2, hidden_states=(x.exp(), x + 1)),
            "output[hidden_states][0]",
        ),
        (an_object, "output.tensor"),
    ],
)
def test_results_in_containers_are_compared(function: Callable[..., Any], subject: str) -> None:
    agreed(cb.check(function, (batch(3, grad=True),), compiler="aot_eager"), gradients=1)

    def spoiled(x: torch.Tensor) -> Any:
        return function(x + 1) if torch.compiler.is_compiling() else function(x)

    # what goes wrong after the compiled region has returned is named by its place in the result
    assert subject in {name for _, name in found(cb.check(spoiled, (batch(3, grad=True),), compiler="eager"))}


@pytest.mark.parametrize(
    ("eager", "compiled", "subject"),
    [
        (lambda x: (x, x), lambda x: [x, x], "output"),
        (lambda x: {"a": (x,)}, lambda x: {"a": [x]}, "output[a]"),
        (lambda x: ((), x), lambda x: ({}, x), "output[0]"),
        (lambda x: {"a": x}, lambda x: OrderedDict(a=x), "output"),
        (lambda x: {"a": x, "b": x + 1}, lambda x: {"b": x + 1, "a": x}, "output"),
    ],
)
def test_types_of_containers_are_compared(eager: Any, compiled: Any, subject: str) -> None:
    def function(x: torch.Tensor) -> Any:
        return compiled(x * 2) if torch.compiler.is_compiling() else eager(x * 2)

    finding = only(cb.check(function, (batch(3),), compiler="eager"))
    assert (finding.detail, finding.subject) == ("structure.container", subject)
    agreed(cb.check(lambda x: eager(x * 2), (batch(3),), compiler="eager"))
    agreed(cb.check(lambda x: compiled(x * 2), (batch(3),), compiler="eager"))


def test_arguments_that_are_changed_inside_of_containers() -> None:
    def change(data: dict[str, Any], kept: list[torch.Tensor]) -> torch.Tensor:
        data["a"][0].add_(1)
        data["new"] = data["b"] * 2
        kept.append(data["b"] + 1)
        return data["a"][0].sum()

    args = ({"a": [batch(3)], "b": batch(2)}, [])
    agreed(cb.check(change, args, compiler="aot_eager"))
    assert list(args[0]) == ["a", "b"]

    def forgets(data: dict[str, Any]) -> torch.Tensor:
        if not torch.compiler.is_compiling():
            data["new"] = data["b"] * 2
            data["b"].add_(1)
        return data["b"].sum() * 0

    assert ("structure.outputs", "mutated[data[new]]") in found(cb.check(forgets, ({"b": batch(2)},), compiler="eager"))


def count(calls: dict[str, Any], x: torch.Tensor) -> torch.Tensor:
    calls["n"] += 1
    calls |= {"of": "count", "last": None}
    return x + 1


def append(log: list[Any], x: torch.Tensor) -> torch.Tensor:
    log += [5, np.float32(2)]  # compiled, the second is an array of no dimensions
    return x + 1


def touch(cache: dict[str, int], x: torch.Tensor) -> torch.Tensor:
    cache["a"] = cache.pop("a")
    return x + 1


@pytest.mark.parametrize(
    ("function", "changed", "expected"),
    [
        (
            count,
            {"n": 3, "of": ""},
            {
                ("mutation", "mutated[calls[n]]"),
                ("structure.value", "mutated[calls[of]]"),
                ("structure.outputs", "mutated[calls[last]]"),
            },
        ),
        (append, [], {("structure.outputs", f"mutated[log[{place}]]") for place in (0, 1)}),
        (touch, {"a": 1, "b": 2}, {("structure.container", "mutated[cache]")}),  # pytorch/pytorch#198189
    ],
)
def test_numbers_and_strings_in_arguments(function: Any, changed: Any, expected: set[tuple[str, str]]) -> None:
    agreed(cb.check(function, (changed, batch(3)), compiler="aot_eager"))
    agreed(cb.check(function, (changed, batch(3)), candidate=function))

    report = cb.check(function, (changed, batch(3)), candidate=lambda given, x: x + 1)
    assert set(found(report)) == expected
    if function is touch:
        assert report.findings[0].message == "its keys are in another order than eager's, from place 0 on"
        assert (report.findings[0].expected, report.findings[0].actual) == ("[b]", "[a]")


def test_a_value_that_eager_does_not_repeat_accuses_nobody() -> None:
    report = cb.check(lambda x: (x + 1, str(uuid4())), (batch(3),), candidate=lambda x: (x + 1, str(uuid4())))
    assert report.verdict is cb.Verdict.INCONCLUSIVE
    assert "output[1]" in {skip.subject for skip in report.coverage.skipped if skip.matters}


def test_numbers_are_checked_as_rounding_and_not_by_equality() -> None:
    def numbers(x: torch.Tensor) -> tuple[Any, ...]:
        return x.sum().item(), int(x.argmax()), "name", torch.float32, x.shape, x.numpy(), True, None

    agreed(cb.check(numbers, (batch(8),), compiler="eager"), tensors=4)

    def wrong(x: torch.Tensor) -> tuple[float, str]:
        return x.sum().item() + (1.0 if torch.compiler.is_compiling() else 0.0), "a"

    assert {name for _, name in found(cb.check(wrong, (batch(8),), compiler="eager"))} == {"output[0]"}


def test_numpy_arrays_are_compared() -> None:
    def arrays(x: torch.Tensor, kept: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        if not torch.compiler.is_compiling():
            kept += 1
        return np.sin(x.numpy()) * (2.5 if torch.compiler.is_compiling() else 2)

    subjects = {name for _, name in found(cb.check(arrays, (batch(8), np.zeros(3)), compiler="eager"))}
    assert subjects == {"output[0]", "mutated[kept]"}
    agreed(cb.check(lambda x: np.sin(x.numpy()), (batch(8),), compiler="eager"), tensors=2)


def test_complex_outputs_get_complex_gradients() -> None:
    """The gradient of a real loss has the conjugate factor; a sum of real parts as the loss would not show it."""
    z = torch.randn(4, dtype=torch.complex64, requires_grad=True)
    report = cb.check(lambda z: (z * z.conj(), z.abs(), torch.fft.fft(z)), (z,), compiler="aot_eager")
    agreed(report, outputs=3, gradients=1)
    wrong = faults.spoiled_gradient("z", lambda gradient: gradient.conj() * 1.0)
    assert found(cb.check(lambda z: z * (1 + 2j), (z,), compiler=wrong)) == {("logic", "grad[z]")}
    conjugated = faults.spoiled_output(lambda value: value.conj().clone())
    assert ("logic", "output[0]") in found(cb.check(lambda z: z * (1 + 2j), (z,), compiler=conjugated))


@dataclass
class Uneven:
    """Like the configuration of a model whose layers differ: it refuses to give what each layer has for itself."""

    scale: float = 2.0
    heads: int = 4
    written: torch.Tensor | None = None

    def __getattribute__(self, name: str) -> Any:
        if name == "heads":
            raise RuntimeError("ask a layer for its heads")
        return super().__getattribute__(name)


class Configured(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config = Uneven()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.config.written = x * (3 if torch.compiler.is_compiling() else 2)
        return x * self.config.scale


def test_an_object_that_refuses_some_of_its_fields_is_copied_and_compared() -> None:
    report = cb.check(Configured(), (batch(8),), compiler="eager")
    assert {name for _, name in found(report)} == {"attribute[config.written]"}
