"""Call a custom operator and see whether it keeps to its schema: what it writes to, and what its outputs share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import fx

from checked_backend._torch import OpOverload, tree_leaves
from checked_backend.interpret.expected import Mismatch
from checked_backend.interpret.schema import effectful
from checked_backend.numerics.fingerprint import fingerprint

__all__ = ["call_watched"]


def call_watched(
    node: fx.Node, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Any, list[Mismatch]]:
    """Call an operator.

    Args:
        node: The node that calls it.
        target: The operator; or ``auto_functionalized``, which runs it on copies of what it may write to; or
            ``with_effects``, which runs it in order.
        args: Its arguments.
        kwargs: Its keyword arguments.

    Returns:
        What it returned; and inputs changed, or memory shared between outputs, without the schema saying so, and
        outputs that take part in autograd where nothing does.
    """
    inner = effectful(target, args)
    operator, given = (target, args) if inner is None else (inner, args[2:])
    watched = [(name, tensor) for name, tensor in _read_only(operator, given, kwargs)]
    before = [fingerprint(tensor) for _, tensor in watched]
    result = target(*args, **kwargs)
    found = [
        Mismatch("mutation", None, f"argument {name} is not written to", "it was changed in place")
        for (name, tensor), value in zip(watched, before, strict=True)
        if value is not None and fingerprint(tensor) != value
    ]
    outputs = [output for output in tree_leaves(result) if isinstance(output, torch.Tensor)]
    found.extend(_shared(operator, outputs))
    if not torch.is_grad_enabled() and isinstance(operator, OpOverload):
        free = any(isinstance(item, torch.Tensor) and item.requires_grad for item in tree_leaves((args, kwargs)))
        for index, output in enumerate(outputs):
            if output.requires_grad and not free:
                place = index if len(outputs) > 1 else None
                found.append(Mismatch("requires_grad", place, "False", "True"))
    return result, found


def _read_only(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that the schema does not let the operator write to, each with its argument's name."""
    if isinstance(target, OpOverload):
        declared = target._schema.arguments
        writable = {argument.name for argument in declared if argument.alias_info and argument.alias_info.is_write}
        named = [(declared[i].name if i < len(declared) else str(i), value) for i, value in enumerate(args)]
        named += list(kwargs.items())
    else:
        writable = set()  # functionalised: what is written to was copied
        named = [(name.lstrip("_"), value) for name, value in kwargs.items()]
    for name, value in named:
        if name not in writable:
            yield from ((name, item) for item in tree_leaves(value) if isinstance(item, torch.Tensor))


def _shared(target: Any, outputs: list[torch.Tensor]) -> Iterator[Mismatch]:
    """Outputs that share memory with each other, though the schema gives each its own."""
    if not isinstance(target, OpOverload) or any(returned.alias_info for returned in target._schema.returns):
        return
    owners: dict[int, int] = {}
    for index, output in enumerate(outputs):
        if output.layout is not torch.strided or output.numel() == 0:
            continue
        owner = owners.setdefault(int(output.untyped_storage()._cdata), index)
        if owner != index:
            yield Mismatch("alias", index, "memory of its own", f"the memory of output {owner}")
