"""Fix the sign of a zero where IEEE 754 leaves it open, because either of two zeros may count as the greater."""

from __future__ import annotations

from typing import Any

import torch

from checked_backend._torch.modes import DisableTorchDispatch
from checked_backend._torch.operators import OpOverload
from checked_backend.graphs.operators import Operator
from checked_backend.modes.base import OperatorMode

__all__ = ["OneZero"]

_OPEN = frozenset({
    "max", "min", "amax", "amin", "aminmax", "maximum", "minimum", "fmax", "fmin", "cummax", "cummin", "clamp",
    "clamp_min", "clamp_max", "clip", "relu", "relu6", "hardtanh", "threshold", "max_pool2d_with_indices",
    "max_pool3d_with_indices", "adaptive_max_pool2d", "adaptive_max_pool3d", "sort", "topk", "median", "kthvalue",
    "mode", "unique", "_unique2",
})  # fmt: skip


class OneZero(OperatorMode):
    """Run a program with the same zero wherever an operator may return either: a maximum, a clamp, a sort.

    Args:
        negative: Whether that zero is -0.0.
    """

    def __init__(self, *, negative: bool) -> None:
        super().__init__()
        self._zero = -0.0 if negative else 0.0

    def run(self, func: OpOverload, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operator, and set all zeros in its results to the chosen one."""
        result = func(*args, **kwargs)
        if operator.base in _OPEN:
            with DisableTorchDispatch():
                for value in result if isinstance(result, (tuple, list)) else (result,):
                    if type(value) is torch.Tensor and value.is_floating_point() and value.layout is torch.strided:
                        plain = value.detach()
                        plain.masked_fill_(plain == 0, self._zero)
        return result
