"""The frame of a mode that sees every ATen operator of an eager program."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import torch

from checked_backend._torch.modes import TorchDispatchMode, disable_current_modes
from checked_backend._torch.operators import HigherOrderOperator, OpOverload, higher_order_kernel, run_composite
from checked_backend._torch.tensors import is_wrapper_type
from checked_backend.graphs.operators import Operator, OperatorKind, describe_operator

PLAIN = (torch.Tensor, torch.nn.Parameter)
"""The types of tensors that are no subclass."""

_REFUSING_MODES = ("cond", "scan", "map_impl", "associative_scan", "invoke_subgraph", "strict_mode")


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in a value, also in lists and tuples in it."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)


def written_tensors(operator: Operator, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors that an operator writes to."""
    return list(tensors_in([args[at] if 0 <= at < len(args) else kwargs.get(name) for at, name in operator.mutated]))


class OperatorMode(TorchDispatchMode):
    """A dispatch mode whose :meth:`run` gets each operator together with its facts.

    Composite operators (visible under inference mode), higher-order operators (cond, while_loop, flex_attention, ...)
    and operators on wrapper subclasses are taken apart first, so that ``run`` sees the operators inside. Autocast's
    cache of weights is off while the mode is active: a cached cast would carry the mode's values out of it, or values
    from outside into it.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        TorchDispatchMode.__init__(self)
        self._autocast_cache: list[bool] = []

    def __enter__(self) -> OperatorMode:
        self._autocast_cache.append(torch.is_autocast_cache_enabled())
        torch.set_autocast_cache_enabled(False)
        TorchDispatchMode.__enter__(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        TorchDispatchMode.__exit__(self, kind, error, traceback)
        torch.set_autocast_cache_enabled(self._autocast_cache.pop())

    @abstractmethod
    def run(self, func: OpOverload, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operator; the mode itself is not active meanwhile.

        Returns:
            The operator's result.
        """

    def opaque(self, name: str) -> None:
        """Take note of a higher-order operator that has no eager implementation in Python to look into."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if types and any(is_wrapper_type(kind) for kind in types):
            return NotImplemented  # the subclass runs operators on what it wraps, under this mode
        if isinstance(func, HigherOrderOperator):
            return self._higher_order(func, args, kwargs or {})
        operator = describe_operator(func)
        if operator.kind is OperatorKind.COMPOSITE:
            with self:
                return run_composite(func, args, kwargs or {})
        return self.run(func, operator, args, kwargs or {})

    def _higher_order(self, func: HigherOrderOperator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kernel = higher_order_kernel(func)
        if kernel is None:
            self.opaque(func.name())
            return func(*args, **kwargs)
        if func.name() not in _REFUSING_MODES:
            with self:
                return kernel(*args, **kwargs)
        # These kernels refuse to run under any mode, but their bodies may. The list has the innermost mode first.
        with disable_current_modes() as outer:
            bodies = [self._under_modes(value, outer) if callable(value) else value for value in args]
            return kernel(*bodies, **kwargs)

    def _under_modes(self, body: Callable[..., Any], outer: Sequence[TorchDispatchMode]) -> Callable[..., Any]:
        """A control-flow body that runs under the modes that were active, this one innermost."""

        def run(*args: Any, **kwargs: Any) -> Any:
            with ExitStack() as stack:
                for mode in (*reversed(outer), self):
                    stack.enter_context(mode)
                return body(*args, **kwargs)

        return run
