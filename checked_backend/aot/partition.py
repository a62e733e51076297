"""How a joint graph is split into forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from checked_backend._torch.aot import default_partition, min_cut_rematerialization_partition
from checked_backend.errors import OptionError

PartitionName = Literal["min_cut", "default"]


def partition_function(name: PartitionName) -> Callable[..., Any]:
    """The partitioner of that name.

    Args:
        name: ``min_cut`` recomputes cheap values in the backward to save less; ``default`` saves what autograd saves.

    Returns:
        ``(joint_module, joint_inputs, *, num_fwd_outputs, ...) -> (forward_module, backward_module)``.

    Raises:
        OptionError: There is no partitioner of that name.
    """
    functions: dict[str, Callable[..., Any]] = {
        "min_cut": min_cut_rematerialization_partition,
        "default": default_partition,
    }
    if name not in functions:
        raise OptionError(f"partition got {name!r}. Valid values: {', '.join(functions)}.")
    return functions[name]
