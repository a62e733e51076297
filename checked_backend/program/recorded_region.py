"""One region of a program that is recorded: what it takes, gives and changes in place, and its gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import fx

from checked_backend.program.products import OPERATIONS, ProductLog, coarsest
from checked_backend.random_state import random_untouched
from checked_backend.regions.inputs import find_effects
from checked_backend.regions.torch_state import RngState
from checked_backend.tensors.streams import is_capturing

__all__ = ["RecordedRegion", "Recorder"]


class Recorder(Protocol):
    """Writes down the tensors of a run."""

    def due(self, call: int) -> bool:
        """Whether a call is recorded."""

    def add(self, region: str, call: int, subject: str, tensor: torch.Tensor, **more: Any) -> None:
        """Record a tensor."""

    def flush(self) -> None:
        """Hand what was recorded to the system."""


class RecordedRegion:
    """A compiled region, each due call of which is recorded.

    Args:
        recorder: Writes it down.
        gm: A copy of its graph, which no compiler has changed. It is kept until the first call.
        inputs: The names of its inputs.
    """

    def __init__(
        self, recorder: Recorder, name: str, gm: fx.GraphModule, inputs: Sequence[str], run: Callable[..., Any]
    ) -> None:
        self._recorder = recorder
        self._name = name
        self._graph: fx.GraphModule | None = gm
        self._inputs = inputs
        self._run = run
        self._calls = 0
        self._mutated: frozenset[int] = frozenset()
        self._kinds: frozenset[str] = frozenset()

    def __call__(self, *args: Any) -> Any:
        """Run the region, and record it if the call is due."""
        self._calls += 1
        call = self._calls
        if not self._recorder.due(call) or is_capturing():
            return self._run(*args)
        self._look(args)
        known = self._precision(args)
        for name, arg in zip(self._inputs, args, strict=False):
            if isinstance(arg, torch.Tensor):
                self._recorder.add(self._name, call, f"input[{name}]", arg, products_outside=known["products_outside"])
        before = RngState.for_inputs(args)
        returned = self._run(*args)
        known["drew"] = not before.same_as(RngState.for_inputs(args))
        self._given(call, args, returned, known)
        self._recorder.flush()
        return returned

    def _given(self, call: int, args: Sequence[Any], returned: Any, known: dict[str, Any]) -> None:
        for index, value in enumerate(returned if isinstance(returned, (tuple, list)) else (returned,)):
            if isinstance(value, torch.Tensor):
                self._recorder.add(self._name, call, f"output[{index}]", value, **known)
                if value.requires_grad and value.grad_fn is not None:
                    value.register_hook(_Once(self._recorder, self._name, call, f"grad_output[{index}]", known))
        for position, (name, arg) in enumerate(zip(self._inputs, args, strict=False)):
            if not isinstance(arg, torch.Tensor):
                continue
            if position in self._mutated:
                self._recorder.add(self._name, call, f"mutated[{name}]", arg, **known)
            if arg.requires_grad and torch.is_grad_enabled():
                once = _Once(self._recorder, self._name, call, f"grad[{name}]", known)
                once.handle = arg.register_hook(once)

    def _look(self, args: Sequence[Any]) -> None:
        """Before the first call that is recorded: what the region changes in place, and whether it multiplies."""
        graph, self._graph = self._graph, None
        if graph is None:
            return
        log = ProductLog()

        def run(*fakes: Any) -> Any:
            with log.watching():
                return graph.forward(*fakes)

        with random_untouched():
            found = find_effects(run, args).mutated
        self._mutated = frozenset(range(len(args))) if found is None else found
        self._kinds = frozenset(log.kinds)

    def _precision(self, args: Sequence[Any]) -> dict[str, Any]:
        """The members of this call's records that tell how it computes."""
        devices = {arg.device.type for arg in args if isinstance(arg, torch.Tensor)} or {"cpu"}
        return {
            "products": max(coarsest(device, self._kinds) for device in devices),
            "products_outside": max(coarsest(device, OPERATIONS) for device in devices),
        }


class _Once:
    """Records the first gradient that arrives at a tensor, and goes away."""

    def __init__(self, recorder: Recorder, region: str, call: int, subject: str, known: dict[str, Any]) -> None:
        self._recorder = recorder
        self._where = (region, call, subject)
        self._known = known
        self.handle: Any = None

    def __call__(self, gradient: torch.Tensor) -> None:
        if self.handle is not None:
            self.handle.remove()
        if is_capturing():
            return
        region, call, subject = self._where
        self._recorder.add(region, call, subject, gradient, **self._known)
        self._recorder.flush()
