"""Packaged models: what ``torch.export`` saves, and what AOTInductor compiles of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch._inductor import aoti_load_package

__all__ = ["load_compiled_package"]


def load_compiled_package(path: Path) -> Callable[..., Any]:
    """A model that AOTInductor has compiled into a package. Its machine code is loaded into this process."""
    model: Callable[..., Any] = aoti_load_package(str(path))
    return model
