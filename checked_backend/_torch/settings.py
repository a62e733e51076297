"""Settings of torch and of its compilers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from operator import attrgetter
from typing import Any

import torch
import torch._dynamo.config

FP32_PRECISIONS = (
    ("generic", "all"),
    ("cuda", "matmul"),
    ("cuda", "conv"),
    ("cuda", "rnn"),
    ("mkldnn", "matmul"),
    ("mkldnn", "conv"),
    ("mkldnn", "rnn"),
)
"""The settings of torch for the precision of float32 arithmetic, the most general first."""


def fp32_precision(backend: str, operation: str) -> str:
    """The precision with which a library computes in float32: ``none``, ``ieee``, ``tf32``, ``bf16``."""
    return str(torch._C._get_fp32_precision_getter(backend, operation))


def set_fp32_precision(backend: str, operation: str, precision: str) -> None:
    """Set `fp32_precision`."""
    torch._C._set_fp32_precision_setter(backend, operation, precision)


def default_device() -> torch.device | None:
    """The device of ``torch.set_default_device``; None if none was set."""
    return getattr(getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None), "device", None)


def backend_flag(backend: str, name: str) -> Any:
    """A flag of ``torch.backends``: of ``cuda.matmul``, ``cudnn``, ``mkldnn``."""
    return getattr(attrgetter(backend)(torch.backends), name)


def set_backend_flag(backend: str, name: str, value: bool) -> None:
    """Set a flag of ``torch.backends``, also after ``torch.backends.disable_global_flags`` forbade it.

    Importing ``torch.testing._internal.common_utils``, as many test suites do, forbids it.
    """
    with torch.backends.__allow_nonbracketed_mutation():
        setattr(attrgetter(backend)(torch.backends), name, value)


def changed_settings() -> dict[str, dict[str, Any]]:
    """The settings of torch's compilers that differ from their defaults, by module."""
    from torch._functorch import config as functorch  # noqa: PLC0415  slow to import
    from torch._inductor import config as inductor  # noqa: PLC0415

    modules: tuple[Any, ...] = (torch._dynamo.config, functorch, inductor)
    return {
        module.__name__: {
            name: value
            for name, value in module.get_config_copy().items()
            if module._config[name].alias is None
            and not module._is_default(name)
            and value != module._config[name].default  # torch does not count a setting that was set back as default
        }
        for module in modules
    }


def without_autocast() -> AbstractContextManager[None]:
    """Run a block with no device's autocast on: what was traced under it has its casts written out."""
    disabled: AbstractContextManager[None] = torch._C._DisableAutocast()
    return disabled


@contextmanager
def jit_autocast_off() -> Iterator[None]:
    """Keep TorchScript's own autocast pass out of graphs that were traced with autocast already applied."""
    before = torch._C._jit_set_autocast_mode(False)
    try:
        yield
    finally:
        torch._C._jit_set_autocast_mode(before)


def precision_in_effect(device: str, operation: str) -> str:
    """The precision with which a kind of device multiplies in float32: ``ieee``, ``tf32``, ``bf16``.

    A CPU computes in a lower one that the settings allow only where it has the instructions for it.
    """
    if device == "cuda":
        found = fp32_precision("cuda", operation)
    elif device == "cpu":
        found = fp32_precision("mkldnn", operation)
        if found == "bf16" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return "ieee"
        if found == "tf32" and not torch.cpu._is_amx_fp16_supported():
            return "ieee"
    else:
        return "ieee"
    return found if found in ("tf32", "bf16") else "ieee"
