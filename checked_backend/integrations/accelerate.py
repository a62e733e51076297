"""Accelerate, and transformers' Trainer: compile with ``numcheck``, which accelerate's list of backends lacks."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from accelerate import Accelerator
from accelerate.utils import TorchDynamoPlugin

from checked_backend.backends import numcheck

_BACKEND = "ACCELERATE_DYNAMO_BACKEND"


@dataclass
class NumcheckPlugin(TorchDynamoPlugin):  # type: ignore[misc]
    """A plugin that checks everything that ``Accelerator(dynamo_plugin=NumcheckPlugin())`` compiles against eager.

    Everything else is as in `TorchDynamoPlugin`: ``backend`` is what is checked (Inductor if neither it nor the
    environment names one), and ``mode`` and ``options`` are that backend's.

    Attributes:
        check: Options of ``numcheck``: ``{"every": 10}``.
    """

    check: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        given = vars(self)["backend"]
        if given is None and os.environ.get(_BACKEND, "no").lower() == "no":
            self.backend = "inductor"
        super().__post_init__()

    def to_kwargs(self) -> dict[str, Any]:
        """Arguments of ``torch.compile``, as accelerate asks for them."""
        kwargs: dict[str, Any] = super().to_kwargs()
        kwargs.pop("check", None)
        chosen = vars(self)["backend"]
        named = kwargs.pop("backend", None) or chosen.value.lower()
        mode = kwargs.pop("mode", None)
        options = {**self.check, "compiler": named, "compiler_options": kwargs.pop("options", None) or {}}
        # torch.compile takes a mode or options, and this has both
        return {**kwargs, "backend": functools.partial(numcheck, options=options, mode=mode)}


def use_numcheck(accelerator: Accelerator, check: Mapping[str, Any] | None = None) -> None:
    """Check what an accelerator compiles. Call it before it prepares the model: for a Trainer, before ``train()``.

    ``Trainer`` makes its accelerator by itself, and refuses ``torch_compile_backend="numcheck"``::

        trainer = Trainer(model, TrainingArguments(..., torch_compile=True))
        use_numcheck(trainer.accelerator)
        trainer.train()

    Args:
        accelerator: It keeps its backend, mode and options; where it compiles nothing, it compiles with Inductor now.
        check: Options of ``numcheck``.
    """
    known = accelerator.state.dynamo_plugin
    backend = known.backend.value.lower()
    accelerator.state.dynamo_plugin = NumcheckPlugin(
        backend="inductor" if backend == "no" else backend,
        mode=known.mode,
        fullgraph=known.fullgraph,
        dynamic=known.dynamic,
        options=known.options,
        disable=known.disable,
        use_regional_compilation=known.use_regional_compilation,
        check=check or {},
    )
