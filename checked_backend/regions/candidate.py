"""The compiled region: run it on the user's tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from checked_backend.errors import CheckedBackendError
from checked_backend.regions.execution import Call
from checked_backend.regions.gradient_gate import gradient_gate
from checked_backend.regions.unsupported import FreshCache, cache_remark, may_be_the_cache
from checked_backend.tensors.streams import wait_for_devices

__all__ = ["Candidate", "NotCompiled"]


class NotCompiled:
    """Stands for the candidate of a region that could not be compiled. Calling it raises the compiler's exception."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __call__(self, *_args: Any) -> Any:
        """Raise the compiler's exception."""
        raise self.error


class Candidate:
    """A compiled region.

    Args:
        compiled: The compiler's result; a `NotCompiled` if it failed.
        replaceable: Whether eager's gradients may be handed out in place of its own.
    """

    def __init__(self, compiled: Callable[..., Any], note: Callable[[str], None], *, replaceable: bool) -> None:
        self._compiled = compiled
        self._note = note
        self._replaceable = replaceable

    @property
    def missing(self) -> bool:
        """Whether it could not be compiled."""
        return isinstance(self._compiled, NotCompiled)

    def __call__(self, *args: Any) -> Any:
        """Run it, unchecked."""
        return self._compiled(*args)

    def results(self, args: Sequence[Any], call: Call) -> Any:
        """Run it for a check."""
        returned = self._returned(args, call)
        wait_for_devices(args)  # what errs later would seem to be a mistake of the check's own
        return returned

    def _returned(self, args: Sequence[Any], call: Call) -> Any:
        inputs = call.inputs
        # To hand out eager's gradients instead, all of the candidate's must pass one node.
        if not self._replaceable or not inputs.requires_grad or inputs.requires_grad & inputs.mutated:
            return self._compiled(*args)
        gated = gradient_gate(args, sorted(inputs.requires_grad))
        returned = self._compiled(*gated)
        if not isinstance(returned, (tuple, list)):
            return returned
        original = {id(alias): arg for alias, arg in zip(gated, args, strict=True)}
        return tuple(original.get(id(value), value) for value in returned)

    def backward_again(self, error: Exception) -> AbstractContextManager[Any] | None:
        """The context under which to run its backward pass once more, which compiles it anew; None to leave it."""
        if isinstance(error, CheckedBackendError) or not may_be_the_cache(error):
            return None
        return self._with_fresh_cache(error)

    @contextmanager
    def _with_fresh_cache(self, error: Exception) -> Iterator[None]:
        with FreshCache().used():
            yield
        self._note(cache_remark(error))
