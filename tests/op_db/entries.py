"""The operators of ``op_db``."""

from __future__ import annotations

from typing import Any

import torch


def operators(dtype: torch.dtype = torch.float32) -> list[Any]:
    """The entries of ``op_db`` that take a dtype on the CPU, in a fixed order."""
    # it imports half of torch.testing, and expecttest
    from torch.testing._internal.common_methods_invocations import op_db

    found = [info for info in op_db if dtype in info.dtypes]
    return sorted(found, key=lambda info: (info.name, info.variant_test_name))


def name_of(info: Any) -> str:
    """An entry's full name."""
    return f"{info.name}.{info.variant_test_name}" if info.variant_test_name else str(info.name)
