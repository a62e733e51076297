"""What was found right before code generation in earlier runs of a program, kept beside what torch keeps of them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
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


def front_file(gm: fx.GraphModule, example_inputs: Sequence[Any], modules: Iterable[GeneratedModule]) -> Path | None:
    """The empty file that exists where a graph was found to be rightly rewritten as those that code was generated from.

    Decompositions and passes take no values, so that the same graphs are as right in the next run. The file's name is a
    digest of them.

    Args:
        gm: Dynamo's graph.
        example_inputs: The values that tracing recorded for its inputs.
        modules: What was generated for it.

    Returns:
        Its path; None if torch keeps nothing of the region, or if its graphs cannot be told apart by text.
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
    return folder / "checked_backend" / f"front-{hashlib.sha256(text.encode()).hexdigest()}"
