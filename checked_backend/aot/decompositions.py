"""Decomposition tables by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch

from checked_backend._torch.inductor import inductor_decompositions
from checked_backend._torch.operators import core_aten_decompositions, get_decompositions
from checked_backend.errors import OptionError

DecompositionName = Literal["none", "default", "core_aten", "inductor"]

# The operators that functorch's compilers decomposed by default; a packet stands for all of its overloads.
_DEFAULT_OPERATORS = """
    detach gelu_backward leaky_relu_backward sigmoid_backward threshold_backward hardtanh_backward
    hardsigmoid_backward hardswish_backward tanh_backward silu_backward elu_backward cudnn_batch_norm
    cudnn_batch_norm_backward masked_fill.Scalar masked_fill.Tensor elu leaky_relu hardtanh hardswish hardsigmoid
    conj_physical is_same_size
"""


def decomposition_table(name: DecompositionName) -> dict[Any, Callable[..., Any]]:
    """The decompositions handed to AOT autograd.

    Args:
        name: ``none`` (empty), ``default`` (functorch's historical list), ``core_aten`` (what ``torch.export`` lowers
            to), ``inductor`` (Inductor's table under its present configuration).

    Returns:
        A new dictionary from operator overload to its decomposition; changing it changes nothing else.

    Raises:
        OptionError: There is no table of that name.
    """
    if name == "none":
        return {}
    if name == "default":
        return dict(get_decompositions(_default_operators()))
    if name == "core_aten":
        return dict(core_aten_decompositions())
    if name == "inductor":
        return inductor_decompositions()
    raise OptionError(f"decompositions got {name!r}. Valid values: none, default, core_aten, inductor.")


def _default_operators() -> list[Any]:
    found = []
    for path in _DEFAULT_OPERATORS.split():
        packet, _, overload = path.partition(".")
        operator = getattr(torch.ops.aten, packet, None)  # an operator that this torch lacks cannot be in a graph
        if operator is not None and overload:
            operator = getattr(operator, overload, None)
        if operator is not None:
            found.append(operator)
    return found
