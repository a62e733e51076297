"""Packaged models: exported programs that AOTInductor compiled."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch._inductor import aoti_load_package

__all__ = ["load_compiled_package"]


def load_compiled_package(path: Path) -> Callable[..., Any]:
    """Load a model that AOTInductor compiled into a package. Its machine code then runs in this process."""
    model: Callable[..., Any] = aoti_load_package(str(path))
    return model
