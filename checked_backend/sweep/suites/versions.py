"""What results depend on besides a model: versions of libraries, and how many devices there are."""

from __future__ import annotations

import platform
from importlib import metadata

import torch

__all__ = ["device_count", "versions"]

_PACKAGES = ("checked-backend", "triton", "transformers", "timm", "torchvision")


def versions() -> dict[str, str]:
    """Versions by name; what is not here is left out."""
    found = {"python": platform.python_version(), "torch": str(torch.__version__)}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def device_count() -> int:
    """How many CUDA devices this process sees."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0
