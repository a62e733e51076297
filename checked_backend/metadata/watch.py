"""Call a custom operator and check that it keeps to its schema: the arguments it writes to, the memory it returns."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from checked_backend._torch.operators import OpOverload
from checked_backend._torch.pytree import tree_leaves
from checked_backend._torch.tensors import StorageWeakRef, is_functorch_wrapped_tensor
from checked_backend.graphs.schema import effectful, wrapped_operator
from checked_backend.metadata.expected import Mismatch
from checked_backend.numerics.fingerprint import fingerprint

_OWN = "memory of its own"
_FIRST_SWEEP = 1024  # freed storages are forgotten for the first time when this many are known


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """The memory of a tensor; None if it has no elements, or no memory that others could share."""
    if tensor.layout is not torch.strided or tensor.is_nested or is_functorch_wrapped_tensor(tensor):
        return None
    return tensor.untyped_storage() if tensor.numel() > 0 else None


class KnownStorages:
    """Storages that were seen before, each with a description of where.

    A storage is identified by a weak reference, not by its address, because an allocator may reuse the address of a
    freed storage.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[int, tuple[StorageWeakRef, str]] = {}
        self._sweep_at = _FIRST_SWEEP

    def note(self, tensors: Iterable[tuple[torch.Tensor, str]]) -> None:
        """Remember the storages of tensors, each with a description of where it was seen."""
        with self._lock:
            for tensor, words in tensors:
                storage = storage_of(tensor)
                if storage is not None:
                    self._known[storage._cdata] = (StorageWeakRef(storage), words)
            if len(self._known) >= self._sweep_at:
                self._known = {key: item for key, item in self._known.items() if not item[0].expired()}
                self._sweep_at = max(_FIRST_SWEEP, 2 * len(self._known))

    def seen(self, tensor: torch.Tensor) -> str | None:
        """The description of where a tensor's storage was seen before; None for a new storage.

        While a weak reference to a storage is held, no other storage can get its identity.
        """
        storage = storage_of(tensor)
        if storage is None:
            return None
        with self._lock:
            found = self._known.get(storage._cdata)
        return None if found is None else found[1]


def call_watched(
    node: fx.Node,
    target: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    checks: Collection[str],
    memory: KnownStorages,
) -> tuple[Any, list[Mismatch]]:
    """Call an operator.

    Args:
        target: The operator; or ``auto_functionalized``, which runs it on copies of the arguments that it may write
            to; or ``with_effects``, which runs it in order.
        memory: The storages that such operators were given and returned before. This call's are added.

    Returns:
        The operator's result, and the mismatches: arguments that changed without the schema declaring it, outputs whose
        memory is not new though the schema declares it new, and outputs that require grad though no input does.
    """
    inner = effectful(target, args)
    operator, given = (target, args) if inner is None else (inner, args[2:])
    named = list(_named(operator, given, kwargs))
    # none are declared if it is functionalised: it writes to copies
    declared = operator._schema.arguments if isinstance(operator, OpOverload) else ()
    writable = {argument.name for argument in declared if argument.alias_info and argument.alias_info.is_write}
    read_only = [item for item in named if item[0] not in writable and "mutation" in checks]
    before = [(name, tensor, _form(tensor), fingerprint(tensor)) for name, tensor in read_only]
    result = target(*args, **kwargs)
    found = list(_changes(before))
    if "alias" in checks:
        found.extend(_not_new(node, target, result, named, memory))
        memory.note(
            (tensor, f"the memory that {node.name} was given before, as {name}, and is not given here")
            for name, tensor in named
        )
        outputs = (leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor))
        memory.note((tensor, f"the memory that {node.name} returned before") for tensor in outputs)
    if "requires_grad" in checks and not torch.is_grad_enabled() and isinstance(operator, OpOverload):
        leaves = [] if any(map(_needs_grad, tree_leaves((args, kwargs)))) else tree_leaves(result)
        places = [index if len(leaves) > 1 else None for index, output in enumerate(leaves) if _needs_grad(output)]
        found += [Mismatch("requires_grad", place, "False", "True") for place in places]
    return result, found


def _needs_grad(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _named(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that an operator is given, each with its argument's name."""
    named = list(kwargs.items())
    if isinstance(target, OpOverload):
        declared = target._schema.arguments
        named += [(declared[i].name if i < len(declared) else str(i), value) for i, value in enumerate(args)]
    else:
        named = [(name.lstrip("_"), value) for name, value in named]
    for name, value in named:
        yield from ((name, item) for item in tree_leaves(value) if isinstance(item, torch.Tensor))


def _changes(before: Sequence[tuple[str, torch.Tensor, tuple[Any, ...], int | None]]) -> Iterator[Mismatch]:
    """Mismatches for read-only tensors that have changed, of which the form and the checksum were taken before."""
    for name, tensor, form, value in before:
        if _form(tensor) != form:
            expected = f"argument {name} keeps its shape, strides and memory"
            yield Mismatch("mutation", None, expected, f"it was changed to {tuple(tensor.shape)}, {_form(tensor)[1]}")
        elif value is not None and fingerprint(tensor) != value:
            yield Mismatch("mutation", None, f"argument {name} is not written to", "it was changed in place")


def _form(tensor: torch.Tensor) -> tuple[Any, ...]:
    """The metadata of a tensor that an operator could change in place."""
    strided = tensor.layout is torch.strided and not tensor.is_nested
    stride = tuple(tensor.stride()) if strided else None
    storage = storage_of(tensor)
    place = (tensor.storage_offset(), None if storage is None else storage._cdata) if strided else None
    return tuple(tensor.shape) if strided else None, f"strides {stride}", place, tensor.dtype, tensor.requires_grad


def _fresh(node: fx.Node, target: Any, result: Any) -> set[int]:
    """Positions, among all leaves of a result, of the outputs that by the schema have memory of their own."""
    operator = wrapped_operator(node) or target
    if not isinstance(operator, OpOverload):
        return set()
    returns, whole = operator._schema.returns, operator is target and len(operator._schema.returns) == 1
    parts = (result,) if whole or not isinstance(result, (tuple, list)) else result
    position, first = 0, 1 if effectful(node.target, node.args) is not None else 0
    found: set[int] = set()
    for index, part in enumerate(parts):
        count = len(tree_leaves(part))
        if first <= index < first + len(returns) and returns[index - first].alias_info is None:
            found.update(range(position, position + count))
        position += count
    return found


def _not_new(
    node: fx.Node, target: Any, result: Any, given: list[tuple[str, torch.Tensor]], memory: KnownStorages
) -> Iterator[Mismatch]:
    """Mismatches for outputs that should have new memory but share it with an argument, an output, or older memory."""
    leaves, fresh = tree_leaves(result), _fresh(node, target, result)
    owners: dict[int, str] = {}
    for name, tensor in given:
        storage = storage_of(tensor)
        if storage is not None:
            owners.setdefault(storage._cdata, f"the memory of argument {name}")
    for index in sorted(range(len(leaves)), key=lambda place: place in fresh):
        output = leaves[index]
        storage = storage_of(output) if isinstance(output, torch.Tensor) else None
        if storage is None:
            continue
        owner = owners.setdefault(storage._cdata, f"the memory of output {index}")
        if index not in fresh:
            continue
        if owner == f"the memory of output {index}":
            owner = memory.seen(output) or ""
        if owner:
            yield Mismatch("alias", index if len(leaves) > 1 else None, _OWN, owner)
