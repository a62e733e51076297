"""Find the first NaN or infinity that a node computes from finite inputs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from checked_backend._torch.pytree import tree_leaves
from checked_backend.metadata.expected import Mismatch

# operators that return uninitialised memory
MAY_BE_ANYTHING = frozenset(
    {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided", "resize"}
)


def value_range(tensor: torch.Tensor) -> tuple[float, float] | None:
    """The least and the greatest value, from one pass over memory; NaN if there is a NaN. None if there is no range."""
    if tensor.layout is not torch.strided or tensor.numel() == 0 or tensor.is_quantized or tensor.device.type == "meta":
        return None
    with torch.no_grad():
        plain = tensor.detach().resolve_conj().resolve_neg()
        if plain.is_complex():
            plain = torch.view_as_real(plain)
        if plain.is_floating_point() and plain.element_size() == 1:
            plain = plain.float()  # the eight-bit formats have no reductions
        low, high = torch.aminmax(plain)
        return float(low), float(high)


def first_nonfinite(node: fx.Node, value: Any, given: tuple[Any, ...]) -> Mismatch | None:
    """A NaN or an infinity in a node's outputs, if there is none in its inputs.

    Args:
        node: The node; its constant arguments count as inputs.
        given: The values of its input nodes, in the order of ``node.all_input_nodes``.
    """
    outputs = tree_leaves(value)
    for index, output in enumerate(outputs):
        if not isinstance(output, torch.Tensor) or not (output.is_floating_point() or output.is_complex()):
            continue
        bounds = value_range(output)
        if bounds is None or all(map(math.isfinite, bounds)):
            continue
        named = list(_named(node, given))
        if any(isinstance(item, float) and not math.isfinite(item) for _, item in named):
            return None
        ranges = [(name, value_range(item)) for name, item in named if isinstance(item, torch.Tensor)]
        if not all(math.isfinite(bound) for _, pair in ranges if pair is not None for bound in pair):
            return None
        constants = (item for item in tree_leaves((node.args, node.kwargs)) if isinstance(item, (int, float)))
        if not all(map(math.isfinite, map(float, constants))):
            return None
        kind = "NaN" if math.isnan(bounds[0]) or math.isnan(bounds[1]) else "an infinity"
        texts = [f"{name} in [{pair[0]:.6g}, {pair[1]:.6g}]" for name, pair in ranges if pair is not None]
        place = index if len(outputs) > 1 else None
        return Mismatch("nonfinite", place, "finite values", kind, f"inputs: {', '.join(texts) or 'none'}")
    return None


def _named(node: fx.Node, given: tuple[Any, ...]) -> Iterator[tuple[str, Any]]:
    """The inputs, also those inside a list or a tuple, each with the name of the node it came from."""
    for source, value in zip(node.all_input_nodes, given, strict=True):
        leaves = tree_leaves(value)
        for index, leaf in enumerate(leaves):
            yield (source.name if len(leaves) == 1 else f"{source.name}[{index}]"), leaf
