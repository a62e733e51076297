"""A small script that shows one operator alone: what its fake kernel says, and what its kernel does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from checked_backend._torch import OpOverload
from checked_backend.interpret.schema import is_custom

__all__ = ["operator_script"]

_LITERAL = 32  # an integer tensor with at most this many elements is written out: indices matter, other values do not

_HEAD = """import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

torch.manual_seed(0)


def tensor(shape, stride, dtype, device="cpu", offset=0, values=None, low=0, high=1):
    size = 1 + offset + sum((n - 1) * s for n, s in zip(shape, stride) if n > 0)
    if values is not None:
        memory = torch.empty(size, dtype=dtype, device=device).as_strided(shape, stride, offset)
        return memory.copy_(torch.tensor(values).view(shape))
    if dtype.is_floating_point or dtype.is_complex:
        memory = torch.randn(size, device=device).to(dtype)
    else:
        memory = torch.randint(low, high + 1, (size,), device=device).to(dtype)
    return memory.as_strided(shape, stride, offset)


def show(value):
    if not isinstance(value, torch.Tensor):
        return repr(value)
    text = f"dtype={value.dtype} shape={tuple(value.shape)}"
    if value.layout is torch.strided:
        significant = [s for n, s in zip(value.shape, value.stride()) if n > 1 and value.numel() > 0]
        text += f" significant strides={significant} storage offset={value.storage_offset()}"
    return text

"""

_TAIL = """
with FakeTensorMode(allow_non_fake_inputs=True) as mode:
    fake_args, fake_kwargs = tree_map_only(torch.Tensor, mode.from_tensor, (args, kwargs))
    fake = operator(*fake_args, **fake_kwargs)
real = operator(*args, **kwargs)
expected, actual = list(map(show, tree_leaves(fake))), list(map(show, tree_leaves(real)))
print("its fake kernel says:", *expected, sep="\\n    ")
print("its kernel returns:", *actual, sep="\\n    ")
raise SystemExit("THEY DIFFER" if expected != actual else "they agree here")
"""


def operator_script(node: fx.Node, inputs: tuple[tuple[Any, ...], dict[str, Any]] | None, title: str) -> str | None:
    """The script, or None if the node is no operator or has an argument that cannot be written down.

    Args:
        node: The node.
        inputs: Its real arguments: their metadata is used, and the values of small integer tensors.
        title: What the script shows.
    """
    target = node.target
    if inputs is None or not isinstance(target, OpOverload):
        return None
    args, kwargs = inputs
    try:
        written = "".join(f"    {_write(value)},\n" for value in args)
        keywords = "".join(f"    {name!r}: {_write(value)},\n" for name, value in kwargs.items())
    except TypeError:
        return None
    lines = [f"# {line}" for line in title.splitlines()]
    if is_custom(node):
        lines.append(f"# First import the module that registers {target.name()}.")
    packet = f"torch.ops.{target.namespace}.{target._schema.name.partition('::')[2]}.{target._overloadname}"
    call = f"operator = {packet}\nargs = (\n{written})\nkwargs = {{\n{keywords}}}\n"
    return "\n".join(lines) + "\n" + _HEAD + call + _TAIL


def _write(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return _write_tensor(value)
    if value is None or isinstance(value, (bool, int, str)):
        return repr(value)
    if isinstance(value, float):
        return repr(value) if value - value == 0 else f'float("{value}")'
    if isinstance(value, complex):
        return repr(value)
    if isinstance(value, (list, tuple)):
        inner = ", ".join(map(_write, value))
        return f"[{inner}]" if isinstance(value, list) else f"({inner}{',' if len(value) == 1 else ''})"
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
        return str(value)
    if isinstance(value, torch.device):
        return f"torch.device({str(value)!r})"
    raise TypeError(type(value))


def _write_tensor(tensor: torch.Tensor) -> str:
    if (
        tensor.layout is not torch.strided
        or type(tensor) not in (torch.Tensor, torch.nn.Parameter)
        or tensor.is_quantized
    ):
        raise TypeError(tensor.layout)
    parts = [str(tuple(tensor.shape)), str(tuple(tensor.stride())), str(tensor.dtype), *_details(tensor)]
    return f"tensor({', '.join(parts)})"


def _details(tensor: torch.Tensor) -> Iterator[str]:
    if tensor.device.type != "cpu":
        yield f"device={str(tensor.device)!r}"
    if tensor.storage_offset():
        yield f"offset={tensor.storage_offset()}"
    if tensor.is_floating_point() or tensor.is_complex() or tensor.numel() == 0:
        return
    if tensor.numel() <= _LITERAL and all(stride > 0 for stride in tensor.stride()):
        yield f"values={tensor.tolist()}"
    else:
        yield f"low={int(tensor.min())}, high={int(tensor.max())}"
