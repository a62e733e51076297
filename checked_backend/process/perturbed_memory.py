"""Have the C library fill the memory that it hands out, so that a program that reads what nothing wrote shows it."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator

__all__ = ["perturbed_memory"]

_M_PERTURB = -6
"""An option of glibc's ``mallopt`` (malloc.h): new memory is filled with the complement of this byte; 0 is off."""

_BYTES = (0x41, 0x42, 0x43, 0x3F)
"""What is in new memory: ordinary numbers in every floating dtype, and no NaN or infinity."""


@contextlib.contextmanager
def perturbed_memory(seed: int) -> Iterator[bool]:
    """Fill the memory that the C library hands out to this process in a block; what is held already is left alone.

    The filling is the process's. Where blocks of several threads overlap, the first that ends ends it.

    Args:
        seed: Another seed is another filling, up to a few.

    Yields:
        Whether there is such an option: glibc has it. An allocator that is loaded before glibc's leaves it without
        effect.
    """
    option = _option()
    if option is None:
        yield False
        return
    option(_M_PERTURB, _BYTES[seed % len(_BYTES)] ^ 0xFF)
    try:
        yield True
    finally:
        option(_M_PERTURB, _chosen_by_user())


def _option() -> ctypes._NamedFuncPointer | None:
    try:
        library = ctypes.CDLL(None)
        if not hasattr(library, "gnu_get_libc_version"):
            return None
        return library.mallopt
    except (OSError, TypeError, AttributeError):  # no C library that a program can ask
        return None


def _chosen_by_user() -> int:
    """What the user asked glibc for: its tunable is read after the older variable, and wins."""
    chosen = [os.environ.get("MALLOC_PERTURB_", "")]
    tunables = dict(one.partition("=")[::2] for one in os.environ.get("GLIBC_TUNABLES", "").split(":"))
    chosen.append(tunables.get("glibc.malloc.perturb", ""))
    byte = 0
    for text in chosen:
        with contextlib.suppress(ValueError):
            byte = int(text, 0) & 0xFF
    return byte
