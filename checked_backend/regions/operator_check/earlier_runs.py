"""What an earlier run of a program has shown of its kernels, so that a second run does not check them again.

Torch keeps what it has compiled. Where all of a region comes from there, its kernels are the same ones, and finding out
which operator each computes means lowering the region anew: for a model in half precision ten times what Inductor
itself needs then. The files lie beside what torch keeps, and go with it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter

from checked_backend._torch.caches import compile_cache_folder
from checked_backend._torch.settings import inductor_settings_hash, precision_in_effect
from checked_backend.report.environment import environment
from checked_backend.report.write import write_whole

_FOLDER = "checked_backend_1"
"""The number is raised when what is written, or how kernels are checked, changes."""

_LARGEST = 1 << 20

_LIMITS = TypeAdapter(dict[str, Annotated[float, Field(ge=0, allow_inf_nan=False)]])


class EarlierRuns:
    """The runs that compiled a region with the same options.

    Args:
        options: What else than its kernels' sources decides what they compute.
    """

    def __init__(self, options: str) -> None:
        self._options = options

    def limits(self, texts: Collection[str]) -> Mapping[str, float] | None:
        """The limits with which the region was checked, and nothing found; None if it was not.

        Args:
            texts: Its generated modules, with the sources of all kernels.
        """
        try:
            with self._file(texts).open("rb") as opened:
                return _LIMITS.validate_json(opened.read(_LARGEST), strict=True)
        except (OSError, ValueError):  # whoever wrote it
            return None

    def remember(self, texts: Collection[str], limits: Mapping[str, float]) -> None:
        """Remember that the region's operators were checked, and nothing was wrong."""
        file = self._file(texts)
        with suppress(OSError):  # a full disk is no error of the program: the next run checks again
            file.parent.mkdir(parents=True, exist_ok=True)
            write_whole(_LIMITS.dump_json(dict(limits)), file)

    def forget(self, texts: Collection[str]) -> None:
        """Something is wrong, with other values than before."""
        with suppress(OSError):
            self._file(texts).unlink(missing_ok=True)

    def _file(self, texts: Collection[str]) -> Path:
        precisions = (precision_in_effect(kind, "matmul") for kind in ("cpu", "cuda"))
        machine = sorted(environment(starts_cuda=False).items())
        facts = (self._options, inductor_settings_hash(), *precisions, *map(str, machine))
        digest = hashlib.sha256("\0".join([*facts, *sorted(texts)]).encode("utf-8", "backslashreplace"))
        return compile_cache_folder() / _FOLDER / f"{digest.hexdigest()}.json"
