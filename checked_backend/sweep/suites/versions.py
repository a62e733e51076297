"""The versions of libraries and the number of devices, on which results depend besides the model."""

from __future__ import annotations

import platform
from importlib import metadata

import torch

__all__ = ["device_count", "versions"]

_PACKAGES = ("checked-backend", "triton", "transformers", "timm", "torchvision")


def versions() -> dict[str, str]:
    """Versions by library name, without libraries that are not installed."""
    found = {"python": platform.python_version(), "torch": str(torch.__version__)}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def device_count() -> int:
    """The number of CUDA devices that this process sees."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0
