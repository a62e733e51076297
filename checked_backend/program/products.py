"""The precision of products of numbers in float32: of a region's own, and what the settings let other code have."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from checked_backend._torch.modes import TorchDispatchMode
from checked_backend._torch.operators import OpOverload
from checked_backend._torch.settings import precision_in_effect

__all__ = ["OPERATIONS", "ProductLog", "coarsest"]

OPERATIONS = ("matmul", "conv", "rnn")
"""What torch has a setting for."""

_ROUNDOFFS = {"tf32": 2.0**-11, "bf16": 2.0**-8}

_NAMES = (
    ("conv", "conv"), ("lstm", "rnn"), ("gru", "rnn"), ("rnn", "rnn"),
    *((name, "matmul") for name in ("mm", "mv", "dot", "linear", "addr", "cdist", "attention")),
)  # fmt: skip


class ProductLog(TorchDispatchMode):
    """Notes which kinds of products of float32 a graph has, while it runs.

    Attributes:
        kinds: Those of `OPERATIONS` that were met. An operator that is not torch's own may multiply inside.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kinds: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(isinstance(arg, torch.Tensor) and arg.dtype in (torch.float32, torch.complex64) for arg in args):
            self.kinds |= _kinds(func)
        return func(*args, **(kwargs or {}))

    @contextmanager
    def watching(self) -> Iterator[None]:
        """A block in which the graph runs; where that fails, it may have any product."""
        try:
            with self:
                yield
        except BaseException:
            self.kinds |= {"matmul", "conv"}
            raise


def coarsest(device: str, operations: Iterable[str]) -> float:
    """The unit roundoff with which a kind of device now multiplies float32 in these operations; 0 for float32's own."""
    return max((_ROUNDOFFS.get(precision_in_effect(device, operation), 0.0) for operation in operations), default=0.0)


def _kinds(func: Any) -> set[str]:
    if not isinstance(func, OpOverload) or func.namespace not in ("aten", "prims", "prim"):
        return {"matmul"}
    name = func._schema.name.partition("::")[2]
    return {next((kind for part, kind in _NAMES if part in name), "")} - {""}
