"""Find the operator that a node runs, directly or through a higher-order operator, and its arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from checked_backend._torch.modes import TorchDispatchMode, disable_current_modes
from checked_backend._torch.operators import HigherOrderOperator, OpOverload, higher_order_kernel
from checked_backend.graphs.schema import effectful

__all__ = ["unwrap_call"]


class _Caught(BaseException):
    """Ends a call once its arguments are known."""


class _Catch(TorchDispatchMode):
    """Catches the arguments of an operator without running it."""

    def __init__(self, operator: OpOverload) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operator = operator
        self.call: tuple[tuple[Any, ...], dict[str, Any]] | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is self.operator:
            self.call = (tuple(args), dict(kwargs or {}))
            raise _Caught
        return func(*args, **(kwargs or {}))


def unwrap_call(
    target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[OpOverload, tuple[Any, ...], dict[str, Any]] | None:
    """The operator that a node runs, with its own arguments.

    ``auto_functionalized`` clones the tensors that a mutating operator writes to, and its second version makes views of
    those clones. The arguments returned here are those clones and views.

    Args:
        target: The node's target: an operator, ``with_effects`` or ``auto_functionalized``.

    Returns:
        The operator and its arguments; None for any other target.
    """
    if isinstance(target, OpOverload):
        return target, args, dict(kwargs)
    inner = effectful(target, args)
    if inner is not None:
        return inner, args[2:], dict(kwargs)
    if not isinstance(target, HigherOrderOperator) or not target.name().startswith("auto_functionalized"):
        return None
    operator, kernel = (args[0] if args else None), higher_order_kernel(target)
    if not isinstance(operator, OpOverload) or kernel is None:
        return None
    catch = _Catch(operator)
    try:
        with disable_current_modes(), catch:
            kernel(*args, **kwargs)
    except _Caught:
        pass
    return None if catch.call is None else (operator, *catch.call)
