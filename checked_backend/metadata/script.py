"""Write a small script that runs one operator alone, with its fake kernel and with its kernel."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

from checked_backend._torch.pytree import tree_leaves
from checked_backend._torch.tensors import is_zero_tensor, negative_view, storage_identity
from checked_backend.graphs.schema import is_custom
from checked_backend.metadata.custom_ops import unwrap_call

__all__ = ["operator_script"]

_LITERAL = 32  # an integer tensor of at most this many elements is written out, because indices matter

_HEAD = """import torch
from torch._subclasses.fake_tensor import FakeTensorMode, disable_fake_tensor_cache
from torch.utils._pytree import tree_leaves, tree_map_only

torch.manual_seed(0)


def tensor(shape, stride, dtype, device="cpu", offset=0, values=None, low=None, high=None):
    size = 1 + offset + sum((n - 1) * s for n, s in zip(shape, stride) if n > 0)
    if values is not None:
        memory = torch.empty(size, dtype=dtype, device=device).as_strided(shape, stride, offset)
        return memory.copy_(torch.tensor(values).view(shape))
    if not dtype.is_floating_point and not dtype.is_complex:
        # an empty tensor has no range; the greatest of all integers is left out, as nothing lies above it
        low, high = low or 0, min(high or 0, 2**63 - 2)
        memory = torch.randint(min(low, high), high + 1, (size,), device=device).to(dtype)
    elif low is None:
        memory = torch.randn(size, device=device).to(dtype)
    else:
        memory = (low + (high - low) * torch.rand(size, dtype=torch.float64, device=device)).to(dtype)
        memory[-1], memory[offset] = high, low
    return memory.as_strided(shape, stride, offset)


def view(base, shape, stride, offset):
    return base.as_strided(shape, stride, offset)


def show(value):
    if not isinstance(value, torch.Tensor):
        return repr(value)
    text = f"dtype={value.dtype} shape={tuple(value.shape)}"
    if value.layout is torch.strided:
        significant = [s for n, s in zip(value.shape, value.stride()) if n > 1 and value.numel() > 0]
        text += f" significant strides={significant} storage offset={value.storage_offset()}"
        text += " conjugated" * value.is_conj() + " negated" * value.is_neg()
    else:
        text += f" layout={value.layout}"
    return text


def tensors(values):
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]

"""

_TAIL = """

def memory(value):
    return value.untyped_storage()._cdata if value.layout is torch.strided else None


def shown(results, given):
    owners = {memory(value): f"tensor argument {i}" for i, value in enumerate(given) if memory(value) is not None}
    for i, value in enumerate(tree_leaves(results)):
        text = show(value)
        if isinstance(value, torch.Tensor) and memory(value) is not None and value.numel() > 0:
            owner = owners.setdefault(memory(value), f"output {i}")
            text += f" in the memory of {owner}" if owner != f"output {i}" else ""
        yield text


def arguments(args, kwargs):
    for i, argument in enumerate(operator._schema.arguments):
        declared = argument.alias_info is not None and argument.alias_info.is_write
        yield argument.name, declared, tensors(args[i] if i < len(args) else kwargs.get(argument.name))


def afterwards(args, kwargs):
    for name, declared, values in arguments(args, kwargs):
        yield from (f"argument {name}, which it writes to: {show(value)}" for value in values if declared)


def undeclared_writes(before):
    for name, declared, values in arguments(args, kwargs):
        for now in values:
            was = before[id(now)]
            same = now.shape == was.shape and (
                torch.equal(now, was) or now.is_floating_point() and torch.allclose(now, was, 0, 0, equal_nan=True)
            )
            if not declared and not same:
                yield name


def said(cached):
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        if not cached:
            with disable_fake_tensor_cache(mode):
                return told(mode)
        told(mode)  # a trace calls each operator more than once
        return told(mode)


def told(mode):
    fake_args, fake_kwargs = tree_map_only(torch.Tensor, mode.from_tensor, (args, kwargs))
    fake = operator(*fake_args, **fake_kwargs)
    return [*shown(fake, tensors((fake_args, fake_kwargs))), *afterwards(fake_args, fake_kwargs)]


expected, traced = said(cached=False), said(cached=True)
before = {id(value): value.clone() for value in tensors((args, kwargs))}
real = operator(*args, **kwargs)
actual, written = [*shown(real, tensors((args, kwargs))), *afterwards(args, kwargs)], list(undeclared_writes(before))
differ, kept = expected != actual or traced != actual or bool(written), set()
if not differ:
    again = tensors(operator(*args, **kwargs))
    kept = {memory(value) for value in tensors(real) if value.numel() > 0} & set(map(memory, again))
    kept -= {None, *map(memory, tensors((args, kwargs)))}
print("its fake kernel says:", *expected, sep="\\n    ")
if traced != expected:
    print("torch's cache of fake results says:", *traced, sep="\\n    ")
print("its kernel returns:", *actual, sep="\\n    ")
print("its kernel writes to what its schema does not declare as written:", written or "nothing")
if kept:
    print("called once more, its kernel returns the same memory again, which by its schema is each output's own")
raise SystemExit("THEY DIFFER" if differ or kept else "they agree here")
"""

_TAIL_NONFINITE = """
def finite(value):
    value = torch.view_as_real(value.resolve_conj()) if value.is_complex() else value
    return not value.is_floating_point() or bool(value.float().isfinite().all())


print("it is given:", *(f"{show(value)} finite={finite(value)}" for value in tensors((args, kwargs))), sep="\\n    ")
real = tensors(operator(*args, **kwargs))
print("it returns:", *(f"{show(value)} finite={finite(value)}" for value in real), sep="\\n    ")
raise SystemExit("finite here" if all(map(finite, real)) else "NOT FINITE")
"""


def operator_script(
    node: fx.Node, inputs: tuple[tuple[Any, ...], dict[str, Any]] | None, title: str, *, nonfinite: bool = False
) -> str | None:
    """The script; None if the node is no operator or has an argument that cannot be written down.

    Args:
        inputs: Its real arguments: their metadata is used, and the values of small integer tensors.
        title: A comment that says what the script shows.
        nonfinite: Show that the operator makes a NaN or an infinity, from the values or the range of each input.
    """
    call = None if inputs is None else unwrap_call(node.target, *inputs)
    if call is None:
        return None
    operator, args, kwargs = call
    writer = _Writer(nonfinite, tree_leaves((args, kwargs)))
    try:
        written = "".join(f"    {writer.write(value)},\n" for value in args)
        keywords = "".join(f"    {name!r}: {writer.write(value)},\n" for name, value in kwargs.items())
    except TypeError:
        return None
    lines = [f"# {line}" for line in title.splitlines()]
    if is_custom(node):
        lines.append(f"# First import the module that registers {operator.name()}.")
    packet = f"torch.ops.{operator.namespace}.{operator._schema.name.partition('::')[2]}.{operator._overloadname}"
    text = f"operator = {packet}\n{writer.shared}args = (\n{written})\nkwargs = {{\n{keywords}}}\n"
    return "\n".join(lines) + "\n" + _HEAD + text + (_TAIL_NONFINITE if nonfinite else _TAIL)


class _Writer:
    """Writes arguments as code.

    Args:
        exact: Whether floating-point values matter.
        leaves: All arguments, flat. Tensors that share memory share it in the script too.

    Attributes:
        shared: Lines that make the memory that several arguments share.
    """

    def __init__(self, exact: bool, leaves: Sequence[Any]) -> None:
        self._exact = exact
        self._bases: dict[tuple[int, torch.dtype], str] = {}
        self.shared = ""
        lying: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor) and _is_plain(leaf) and leaf.numel() > 0:
                lying.setdefault(_memory_of(leaf), []).append(leaf)
        for key, tensors in lying.items():
            if len(tensors) > 1 and not any(item.is_conj() or item.is_neg() for item in tensors):
                whole = tensors[0].detach().as_strided((max(map(_extent, tensors)),), (1,), 0)
                self._bases[key] = f"memory_{len(self._bases)}"
                self.shared += f"{self._bases[key]} = {_write_tensor(whole, exact)}\n"

    def write(self, value: Any) -> str:
        """A value as code.

        Raises:
            TypeError: It cannot be written.
        """
        if isinstance(value, torch.Tensor):
            base = self._bases.get(_memory_of(value)) if _is_plain(value) and value.numel() > 0 else None
            if base is None:
                return _write_tensor(value, self._exact)
            return f"view({base}, {tuple(value.shape)}, {tuple(value.stride())}, {value.storage_offset()})"
        if value is None or isinstance(value, (bool, int, str)):
            return repr(value)
        if isinstance(value, float):
            return repr(value) if value - value == 0 else f'float("{value}")'
        if isinstance(value, complex):
            return repr(value)
        if isinstance(value, (list, tuple)):
            inner = ", ".join(map(self.write, value))
            return f"[{inner}]" if isinstance(value, list) else f"({inner}{',' if len(value) == 1 else ''})"
        if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
            return str(value)
        if isinstance(value, torch.device):
            return f"torch.device({str(value)!r})"
        raise TypeError(type(value))


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and not (tensor.is_quantized or tensor.is_nested or is_zero_tensor(tensor))
    )


def _memory_of(tensor: torch.Tensor) -> tuple[int, torch.dtype]:
    return storage_identity(tensor), tensor.dtype


def _extent(tensor: torch.Tensor) -> int:
    """The number of elements from the beginning of a tensor's memory to its last element."""
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int(tensor.storage_offset() + reach + 1)


def _write_tensor(tensor: torch.Tensor, exact: bool) -> str:
    if not _is_plain(tensor):
        raise TypeError(tensor.layout)
    if tensor.is_neg():
        return f"torch._neg_view({_write_tensor(negative_view(tensor), exact)})"
    if tensor.is_conj():
        return f"{_write_tensor(tensor.conj(), exact)}.conj()"
    parts = [str(tuple(tensor.shape)), str(tuple(tensor.stride())), str(tensor.dtype), *_details(tensor, exact)]
    return f"tensor({', '.join(parts)})"


def _details(tensor: torch.Tensor, exact: bool) -> Iterator[str]:
    if tensor.device.type != "cpu":
        yield f"device={str(tensor.device)!r}"
    if tensor.storage_offset():
        yield f"offset={tensor.storage_offset()}"
    inexact = tensor.is_floating_point() or tensor.is_complex()
    if tensor.numel() == 0 or (inexact and not exact):
        return
    if tensor.numel() <= _LITERAL and all(stride > 0 for stride in tensor.stride()):
        yield f"values={tensor.tolist()}"
    elif not tensor.is_complex():
        # torch has no `min` for some narrow floats and wide unsigned integers
        plain = tensor.detach()
        if inexact and tensor.dtype.itemsize < 4:
            plain = plain.float()
        elif tensor.dtype in (torch.uint16, torch.uint32, torch.uint64):
            plain = plain.to(torch.int64).clamp_min(0)  # only the lower half of uint64's range
        low, high = plain.min().item(), plain.max().item()
        yield f"low={low if inexact else int(low)}, high={high if inexact else int(high)}"
