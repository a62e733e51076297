"""How to run and check a case."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

Mode = Literal["inference", "training"]
Dtype = Literal["float32", "bfloat16", "float16", "amp"]
MODES: tuple[str, ...] = get_args(Mode)
DTYPES: tuple[str, ...] = get_args(Dtype)


@dataclass(frozen=True, slots=True)
class Settings:
    """How to run and check a case, from the rules and the command line.

    Attributes:
        run_as: The dtype to run the model in, instead of the case's own.
        timeout: Seconds after which the case counts as hung.
        skip: The reason why the case is not run; empty if it is run.
        tags: Known properties of the model, each with its reason: ``slow``, ``non_deterministic``, ``control_flow``.
        ignore_outputs: Subjects whose findings do not fail the case, each with its reason.
        known_fails: Kinds of findings that are known of the model, each with its reason.
        noise: The greatest relative error that counts as noise, by subject, each with its reason.
        optimizer: An optimizer of ``torch.optim`` for training, as ``NAME:KEY=VALUE,...``; None for none.
    """

    run_as: str | None = None
    batch_size: int | None = None
    timeout: float = 1800.0
    skip: str | None = None
    tags: Mapping[str, str] = field(default_factory=dict)
    ignore_outputs: Mapping[str, str] = field(default_factory=dict)
    known_fails: Mapping[str, str] = field(default_factory=dict)
    noise: Mapping[str, tuple[float, str]] = field(default_factory=dict)
    compiler_options: Mapping[str, Any] = field(default_factory=dict)
    optimizer: str | None = None
    localize: bool = False

    def digest(self, source: str) -> str:
        """A short text that changes when the settings or the suite's source change.

        Time limits and tags are left out, because a result stays valid when they change.
        """
        parts = asdict(self)
        for name in ("timeout", "tags", "skip", "localize"):
            del parts[name]
        text = json.dumps([parts, source], sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:16]
