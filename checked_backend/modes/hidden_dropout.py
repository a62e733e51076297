"""Dropout inside an attention kernel: let it draw the same again, and ask it for the mask that it does not return."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from checked_backend._torch.operators import OpOverload
from checked_backend.graphs.operators import Operator, argument

__all__ = ["HiddenDropout"]

_ATTENTION = "_scaled_dot_product_"
"""Kernels of this name take queries, keys and values of (batch, heads, length, width)."""


@dataclass(frozen=True, slots=True)
class HiddenDropout:
    """One call of an attention kernel with dropout.

    The kernel takes its numbers from a generator, by a counter and the position in the matrix of attention weights:
    from the same state it drops the same weights, whatever the values are (Philox; ``philox_cuda_state`` in
    ``aten/src/ATen/native/transformers/cuda``).

    Attributes:
        func: The kernel.
        generator: What it draws from.
        state: The generator's state before the call.
        like: Query, key and value of the call, as shape and dtype.
        settings: The call's other arguments, by name, as far as they are numbers.
    """

    func: OpOverload
    generator: torch.Generator
    state: torch.Tensor
    like: tuple[tuple[torch.Size, torch.dtype], ...]
    settings: Mapping[str, Any]

    @classmethod
    def before(
        cls, func: OpOverload, operator: Operator, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> HiddenDropout | None:
        """What is about to be drawn; None if it is not known from where (cuDNN's recurrent layers keep their own)."""
        if "attention" not in operator.base or not args or not isinstance(args[0], torch.Tensor):
            return None
        device = args[0].device
        if device.type not in ("cpu", "cuda"):
            return None
        generator = torch.default_generator
        if device.type == "cuda":
            at = torch.cuda.current_device() if device.index is None else device.index
            generator = torch.cuda.default_generators[at]
        like = tuple((value.shape, value.dtype) for value in args[:3] if isinstance(value, torch.Tensor))
        found = {name: argument(operator, args, kwargs, name) for name in (*operator.positions, *kwargs)}
        settings = {name: value for name, value in found.items() if isinstance(value, (bool, int, float))}
        return cls(func, generator, generator.get_state(), like, settings)

    @contextmanager
    def again(self) -> Iterator[None]:
        """In the block the kernel draws the same; afterwards the generator goes on from where it was."""
        now = self.generator.get_state()
        self.generator.set_state(self.state)
        try:
            yield
        finally:
            self.generator.set_state(now)

    def mask(self) -> torch.Tensor | None:
        """The attention weights that were kept, (batch, heads, queries, keys), bool; None if the kernel is another one.

        With queries and keys of zero all weights are equal, and with the unit matrix for values each column of the
        result is the mask of one key.
        """
        if len(self.like) != 3 or not self.func._schema.name.split("::")[-1].startswith(_ATTENTION):
            return None
        query, key, value = (
            torch.zeros(shape, dtype=dtype, device=self.generator.device) for shape, dtype in self.like
        )
        keys, width = value.shape[-2:]
        kept = torch.zeros(*query.shape[:-1], keys, dtype=torch.bool, device=query.device)
        settings = {**self.settings, "is_causal": False}
        if any(item.name == "attn_bias" for item in self.func._schema.arguments):
            settings["attn_bias"] = None
        for first in range(0, keys, width):
            count = min(width, keys - first)
            value.zero_()[..., first : first + count, :count] = torch.eye(count, dtype=value.dtype, device=value.device)
            with self.again():
                found = self.func(query, key, value, **settings)[0]
            kept[..., first : first + count] = found[..., :count] != 0
        return kept
