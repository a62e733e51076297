"""Compilers that are wrong on purpose, one for each kind of fault: for ``selftest``, and to try the whole tool.

Each takes ``(gm, example_inputs)`` as a backend of ``torch.compile`` does. The graph runs as it is, node by node, but
for the fault. They need no C++ compiler.
"""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from checked_backend.findings import Kind

CONTROL = "none"
"""The name of the compiler that is right."""

SHARED = "shared"
"""The name of the fault that one of several programs in one compile has."""

_Run = Callable[..., Any]
_Backend = Callable[[fx.GraphModule, Sequence[Any]], _Run]
_Change = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Fault:
    """A planted fault.

    Attributes:
        kind: The kind of finding that says what it is; a crash is also the end of its process. None for no fault.
        gradients: Whether it shows in a backward pass alone.
        dynamic: Whether it shows with other sizes alone.
        detail: The finer kind, where another one would be another fault.
    """

    compiler: _Backend
    kind: Kind | None
    words: str
    gradients: bool = False
    dynamic: bool = False
    detail: str = ""

    def is_told_by(self, kind: str, detail: str) -> bool:
        """Whether a finding of this kind says what it is; of the right compiler, any."""
        if self.kind is None:
            return bool(kind)
        return kind == self.kind.value and self.detail in ("", detail)


def _named(node: fx.Node) -> str:
    """The plain name of what a node calls: ``add`` of ``torch.add``, ``+``, ``Tensor.add_``."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    return name.strip("_")


def _after(names: Sequence[str], change: _Change) -> _Backend:
    """A compiler that changes the tensors that some operators compute."""

    class _Runner(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            value = super().run_node(n)
            is_one = n.op in ("call_function", "call_method") and _named(n) in names
            return change(value) if is_one and isinstance(value, torch.Tensor) and value.numel() else value

    return lambda gm, _example_inputs: _Runner(gm).run


def _off_by_a_bit(value: torch.Tensor) -> torch.Tensor:
    if value.dtype is torch.bool:
        return ~value
    return value + (value.abs() * 0.05 + 0.05 if value.is_floating_point() or value.is_complex() else 1)


def _one_nan(value: torch.Tensor) -> torch.Tensor:
    if not value.is_floating_point():
        return value
    spoiled = value.clone()
    spoiled[tuple(size - 1 for size in value.shape)] = float("nan")
    return spoiled


def _run(wrap: Callable[[_Run], _Run]) -> _Backend:
    """A compiler that runs the graph as another function does."""
    return lambda gm, _example_inputs: wrap(gm.forward)


def _results(change: _Change) -> _Backend:
    """A compiler that changes the tensors that a region returns."""

    def wrap(forward: _Run) -> _Run:
        return lambda *args: [change(r) if isinstance(r, torch.Tensor) else r for r in forward(*args)]

    return _run(wrap)


def _only_later(forward: _Run) -> _Run:
    """The second call is wrong, and no other."""
    calls = itertools.count(1)

    def run(*args: Any) -> Any:
        results = forward(*args)
        return [_five_percent(r) for r in results] if next(calls) == 2 else results

    return run


def _only_other_sizes(forward: _Run) -> _Run:
    """A call with other sizes than those of the first is wrong."""
    first: list[list[torch.Size]] = []

    def run(*args: Any) -> Any:
        sizes = [one.shape for one in args if isinstance(one, torch.Tensor)]
        if not first:
            first.append(sizes)
        results = forward(*args)
        return results if sizes == first[0] else [_five_percent(r) for r in results]

    return run


def _five_percent(value: Any) -> Any:
    plain = isinstance(value, torch.Tensor) and value.is_floating_point() and not value._is_view()
    return value * 1.05 + 0.05 if plain else value


def _one_memory(forward: _Run) -> _Run:
    """All calls return their results in the memory of the first call's."""
    kept: list[torch.Tensor | None] = []

    def run(*args: Any) -> Any:
        results = [*forward(*args)]
        if kept:
            return [
                new if old is None or old.shape != new.shape else old.copy_(new)
                for old, new in zip(kept, results, strict=True)
            ]
        kept.extend(result if _has_own_memory(result, args) else None for result in results)
        return results

    return run


def _has_own_memory(result: Any, args: Sequence[Any]) -> bool:
    if not isinstance(result, torch.Tensor) or result._is_view() or result.requires_grad:
        return False
    where = result.untyped_storage().data_ptr()
    return all(one.untyped_storage().data_ptr() != where for one in args if isinstance(one, torch.Tensor))


def _on_copies(forward: _Run) -> _Run:
    """The inputs are copied, so what the program writes to them is lost."""
    return lambda *args: forward(*(a.clone() if isinstance(a, torch.Tensor) and a.is_leaf else a for a in args))


def _uncounted(forward: _Run) -> _Run:
    """The inputs are written to, but not counted, as a kernel does that has their addresses alone."""
    return lambda *args: forward(*(a.data if isinstance(a, torch.Tensor) and not a.requires_grad else a for a in args))


def _drawing(forward: _Run) -> _Run:
    """A random number too many is drawn, so that the program's next one is another."""

    def run(*args: Any) -> Any:
        torch.rand(())
        return forward(*args)

    return run


class _Halved(torch.autograd.Function):
    """The identity, whose gradient is halved."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient / 2


def _halved(result: torch.Tensor) -> torch.Tensor:
    apply: Any = _Halved.apply
    halved: torch.Tensor = apply(result) if result.requires_grad else result
    return halved


def _where_common(act: Callable[[str], None]) -> _Backend:
    """A compiler that does something else than compile where it meets a common operator."""

    def compiler(gm: fx.GraphModule, _example_inputs: Sequence[Any]) -> Callable[..., Any]:
        for name in map(_named, gm.graph.nodes):
            if name in _COMMON:
                act(name)
        return gm.forward

    return compiler


def _refuse(name: str) -> None:
    raise NotImplementedError(f"no lowering for {name}")


def _die(_name: str) -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def _hang(_name: str) -> None:
    time.sleep(3600)


_COMMON = ("add", "iadd", "mul", "imul", "sub", "where", "clamp", "sum")
_WIDELY = (*_COMMON, "exp", "tanh", "abs", "sigmoid")

FAULTS: Mapping[str, Fault] = {
    "logic": Fault(_after(_COMMON, _off_by_a_bit), Kind.LOGIC, "an operator's values are 5 % off"),
    "nonfinite": Fault(_after(_WIDELY, _one_nan), Kind.NONFINITE, "an element is NaN"),
    "precision": Fault(
        _after(_WIDELY, lambda value: value.bfloat16().float() if value.dtype is torch.float32 else value),
        Kind.PRECISION,
        "an operator loses half of its bits",
    ),
    "random": Fault(_run(_drawing), Kind.RNG, "a random number too many is drawn"),
    "structure": Fault(
        _results(lambda r: r.double() if r.dtype is torch.float32 else r), Kind.STRUCTURE, "a result has another dtype"
    ),
    "alias": Fault(_results(lambda r: r.clone() if r._is_view() else r), Kind.ALIAS, "a returned view is a copy"),
    "mutation": Fault(_run(_on_copies), Kind.MUTATION, "an input is not changed in place"),
    "uncounted": Fault(
        _run(_uncounted), Kind.MUTATION, "a write to an input is not counted", detail="mutation.uncounted"
    ),
    "gradient": Fault(_results(_halved), Kind.LOGIC, "gradients are halved", gradients=True),
    "later": Fault(_run(_only_later), Kind.LOGIC, "the second call is wrong, and no other"),
    "overwrites": Fault(_run(_one_memory), Kind.ALIAS, "a call overwrites earlier results", detail="alias.overwritten"),
    "sizes": Fault(_run(_only_other_sizes), Kind.LOGIC, "other sizes are wrong", dynamic=True),
    "refuses": Fault(_where_common(_refuse), Kind.CRASH, "the compiler raises"),
    "dies": Fault(_where_common(_die), Kind.CRASH, "the process is killed"),
    "hangs": Fault(_where_common(_hang), Kind.CRASH, "the compiler never ends"),
    SHARED: Fault(_after(("sinh",), _off_by_a_bit), Kind.LOGIC, "one of four in a compile is wrong"),
    CONTROL: Fault(_run(lambda forward: forward), None, "nothing is wrong"),
}
"""The faults by name. `CONTROL` is no fault: nothing may be found."""
