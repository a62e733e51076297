"""What an earlier run of a program has shown of its kernels, so that a second run does not check them again.

Torch keeps what it has compiled. Where all of a region comes from there, its kernels are the same ones, and finding out
which operator each computes means lowering the region anew: for a model in half precision ten times what Inductor
itself needs then. The files lie beside what torch keeps, and go with it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Annotated

import torch
from pydantic import Field, TypeAdapter

from checked_backend._torch.caches import compile_cache_folder
from checked_backend._torch.settings import precision_in_effect
from checked_backend.report.write import write_whole

_FOLDER = "checked_backend_1"
"""The number is raised when what is written, or how kernels are checked, changes."""

_LARGEST = 1 << 20

_LIMITS = TypeAdapter(dict[str, Annotated[float, Field(ge=0, allow_inf_nan=False)]])


def recalled(texts: Collection[str]) -> Mapping[str, float] | None:
    """The limits with which an earlier run has checked a region, and found nothing; None if none has.

    Args:
        texts: The generated modules of the region, with the sources of all kernels.
    """
    file = _file(texts)
    try:
        with file.open("rb") as opened:
            return _LIMITS.validate_json(opened.read(_LARGEST), strict=True)
    except (OSError, ValueError):  # whoever wrote it
        return None


def remember(texts: Collection[str], limits: Mapping[str, float]) -> None:
    """Remember that a region's operators have been checked, and that nothing was wrong."""
    file = _file(texts)
    with suppress(OSError):  # a full disk is no error of the program: the next run checks again
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(_LIMITS.dump_json(dict(limits)), file)


def _file(texts: Collection[str]) -> Path:
    """The file for these modules: another release, machine, or precision of libraries has another."""
    devices = [torch.cuda.get_device_name()] if torch.cuda.is_initialized() else []
    facts = [
        metadata.version("checked-backend"),
        torch.__version__,
        torch.backends.cpu.get_cpu_capability(),
        *(precision_in_effect(kind, "matmul") for kind in ("cpu", "cuda")),
        *devices,
    ]
    digest = hashlib.sha256("\0".join([*facts, *sorted(texts)]).encode("utf-8", "backslashreplace"))
    return compile_cache_folder() / _FOLDER / f"{digest.hexdigest()}.json"
