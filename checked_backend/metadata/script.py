"""Write a small script that runs one operator alone, with its fake kernel and with its kernel."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from checked_backend._torch.pytree import tree_leaves
from checked_backend.graphs.schema import is_custom
from checked_backend.metadata.attribution import unwrap_call
from checked_backend.scripts.comparisons import FAKE_KERNEL, FINITE, source_of
from checked_backend.scripts.values import TensorWriter, Untranslatable, write_value

__all__ = ["operator_script"]

_FAKE_IMPORTS = (
    "from contextlib import nullcontext",
    "",
    "import torch",
    "from torch._subclasses.fake_tensor import FakeTensorMode, disable_fake_tensor_cache",
    "from torch.utils._pytree import tree_leaves, tree_map_only",
)
_IMPORTS = ("import torch", "from torch.utils._pytree import tree_leaves")


def operator_script(
    node: fx.Node, inputs: tuple[tuple[Any, ...], dict[str, Any]] | None, title: str, *, nonfinite: bool = False
) -> str | None:
    """The script; None if the node is no operator or has an argument that cannot be written down.

    Args:
        inputs: Its real arguments. Of many values, others between the least and the greatest are made.
        nonfinite: Show that the operator makes a NaN or an infinity.
    """
    call = None if inputs is None else unwrap_call(node.target, *inputs)
    if call is None:
        return None
    operator, args, kwargs = call
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    writer = TensorWriter(tensors, offsets=True, long=_in_range)

    def tensor(value: Any) -> str | None:
        return writer.write(value, "it") if isinstance(value, torch.Tensor) else None

    try:
        written = [f"    {write_value(value, tensor)}," for value in args]
        keywords = [f"    {name!r}: {write_value(value, tensor)}," for name, value in kwargs.items()]
    except (NotImplementedError, RuntimeError, Untranslatable):  # also dtypes whose values torch cannot read
        return None
    own = [f"# First import the module that registers {operator.name()}."] if is_custom(node) else []
    packet = f"torch.ops.{operator.namespace}.{operator._schema.name.partition('::')[2]}.{operator._overloadname}"
    end = (
        '"finite here" if all_are_finite(operator, args, kwargs) else "NOT FINITE"'
        if nonfinite
        else '"THEY DIFFER" if fake_kernel_differs(operator, args, kwargs) else "they agree here"'
    )
    lines = [
        *(f"# {line}" for line in title.splitlines()),
        *own,
        *(_IMPORTS if nonfinite else _FAKE_IMPORTS),
        *source_of(*(FINITE if nonfinite else FAKE_KERNEL)),
        "",
        "",
        "torch.manual_seed(0)",
        f"operator = {packet}",
        *writer.lines,
        "args = (",
        *written,
        ")",
        "kwargs = {",
        *keywords,
        "}",
        f"raise SystemExit({end})",
    ]
    return "\n".join(lines) + "\n"


def _in_range(values: torch.Tensor) -> str:
    """Other values between the least and the greatest of these."""
    shape, dtype = tuple(values.shape), values.dtype
    if dtype.is_complex:
        return f"torch.randn({shape}, dtype=torch.complex64).to({dtype})"
    # torch has no `min` for some narrow floats and wide unsigned integers
    wide = values.double() if dtype.is_floating_point else values.to(torch.int64)
    if dtype in (torch.uint16, torch.uint32, torch.uint64):
        wide = wide.clamp_min(0)  # only the lower half of uint64's range
    low, high = wide.min().item(), wide.max().item()
    if dtype.is_floating_point:
        ends = f"{write_value(low)}, {write_value(high)}, {values.numel()}"
        return f"torch.linspace({ends}, dtype=torch.float64).to({dtype}).reshape({shape})"
    return f"torch.randint({low}, {min(int(high), 2**63 - 2) + 1}, {shape}).to({dtype})"
