"""What was found right before code generation in earlier runs of a program, kept beside what torch keeps of them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import fx

from checked_backend._torch.caches import compile_cache_folder
from checked_backend._torch.generated_modules import GeneratedModule
from checked_backend._torch.graph_code import graph_digest
from checked_backend._torch.graph_json import NotInJsonError, value_to_json

FORMAT = 1
"""It is raised with what the check of a front looks at."""


class FrontRecord:
    """Whether a graph was found to be rightly rewritten as the graphs that code was generated from.

    Decompositions and passes take no values, so that the same graphs are as right in the next run. An empty file is
    kept, whose name is a digest of them.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    @classmethod
    def of(
        cls, gm: fx.GraphModule, example_inputs: Sequence[Any], modules: Iterable[GeneratedModule]
    ) -> FrontRecord | None:
        """The record of a region; None if torch keeps nothing of it, or if its graphs cannot be told apart by text.

        Args:
            gm: Dynamo's graph.
            example_inputs: The values that tracing recorded for its inputs.
            modules: What was generated for it.
        """
        folder = compile_cache_folder()
        if folder is None:
            return None
        try:
            graphs = [one.to_json() for one in modules]
            inputs = [(value_to_json(value), getattr(value, "requires_grad", None)) for value in example_inputs]
        except NotInJsonError:
            return None
        text = json.dumps([FORMAT, torch.__version__, graph_digest(gm), inputs, graphs])
        return cls(folder / "checked_backend" / f"front-{hashlib.sha256(text.encode()).hexdigest()}")

    def is_right(self) -> bool:
        """Whether it was found right."""
        with suppress(OSError):
            return self._path.exists()
        return False

    def note_right(self) -> None:
        """Keep that it was found right. A folder that cannot be written to keeps nothing."""
        with suppress(OSError):
            self._path.parent.mkdir(exist_ok=True)
            self._path.touch()
