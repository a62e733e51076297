"""The settings of the process that a script must have too: those by which numbers change."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from checked_backend.regions.process_state import ProcessState, following

__all__ = ["process_lines"]

_SETTINGS: Mapping[str, tuple[Any, str]] = MappingProxyType(
    {
        "deterministic": ((False, False), "torch.use_deterministic_algorithms({0[0]}, warn_only={0[1]})"),
        "flush_denormal": (False, "torch.set_flush_denormal({0})"),
        "float32_matmul_precision": ("highest", "torch.set_float32_matmul_precision({0!r})"),
        "fp32_precision.generic.all": ("none", "torch.backends.fp32_precision = {0!r}"),
        "fp32_precision.cuda.matmul": ("none", "torch.backends.cuda.matmul.fp32_precision = {0!r}"),
        "fp32_precision.cuda.conv": ("tf32", "torch.backends.cudnn.conv.fp32_precision = {0!r}"),
        "fp32_precision.cuda.rnn": ("tf32", "torch.backends.cudnn.rnn.fp32_precision = {0!r}"),
        "fp32_precision.mkldnn.matmul": ("none", "torch.backends.mkldnn.matmul.fp32_precision = {0!r}"),
        "fp32_precision.mkldnn.conv": ("none", "torch.backends.mkldnn.conv.fp32_precision = {0!r}"),
        "fp32_precision.mkldnn.rnn": ("none", "torch.backends.mkldnn.rnn.fp32_precision = {0!r}"),
        "matmul.allow_fp16_reduced_precision_reduction": (
            True,
            "torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = {0}",
        ),
        "matmul.allow_bf16_reduced_precision_reduction": (
            True,
            "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = {0}",
        ),
        "matmul.allow_fp16_accumulation": (False, "torch.backends.cuda.matmul.allow_fp16_accumulation = {0}"),
        "cudnn.enabled": (True, "torch.backends.cudnn.enabled = {0}"),
        "cudnn.benchmark": (False, "torch.backends.cudnn.benchmark = {0}"),
        "cudnn.deterministic": (False, "torch.backends.cudnn.deterministic = {0}"),
        "mkldnn.enabled": (True, "torch.backends.mkldnn.enabled = {0}"),
        "mkldnn.deterministic": (False, "torch.backends.mkldnn.deterministic = {0}"),
        "sdp.flash": (True, "torch.backends.cuda.enable_flash_sdp({0})"),
        "sdp.mem_efficient": (True, "torch.backends.cuda.enable_mem_efficient_sdp({0})"),
        "sdp.math": (True, "torch.backends.cuda.enable_math_sdp({0})"),
        "sdp.cudnn": (True, "torch.backends.cuda.enable_cudnn_sdp({0})"),
    }
)
"""Torch's own values, and the code that sets others. Those of dtypes and devices stand in the program itself."""


def process_lines(state: ProcessState) -> list[str]:
    """The lines that set what is not as torch sets it itself.

    Args:
        state: The settings under which the bug shows.
    """
    changed = [name for name, (own, _) in _SETTINGS.items() if state.values.get(name, own) not in (own, None)]
    led = {name for leader in changed for name in following(leader)}
    return [_SETTINGS[name][1].format(state.values[name]) for name in changed if name not in led]
