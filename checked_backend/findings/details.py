"""The finer kinds of findings: ``structure.stride`` and the like. A name that is not here is a slip of the pen."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from checked_backend.findings.kinds import Kind

FINER: Mapping[Kind, tuple[str, ...]] = MappingProxyType(
    {
        Kind.STRUCTURE: (
            *("type", "dtype", "shape", "device", "layout", "stride", "requires_grad", "indices", "value", "outputs"),
            *("container", "collective", "inference", "offset", "bits", "assert", "other_run"),
        ),
        Kind.ALIAS: ("identity", "memory", "overwritten"),
        Kind.MUTATION: (
            *("wrong", "dropped", "unexpected", "beyond", "uncounted"),
            # settings of the process that stay changed
            *("inference_mode", "grad_mode", "autocast", "default_dtype", "default_device", "deterministic"),
            *("num_threads", "flush_denormal", "float32_matmul_precision", "fp32_precision"),
            *("cudnn", "mkldnn", "matmul", "sdp"),
        ),
        Kind.LOGIC: ("baked", "other_run", "ranks", "sign_of_zero", "this_call", "this_compilation", "this_dtype"),
        Kind.PRECISION: ("operator", "other_run", "traced", "batch", "runs", "choices"),
        Kind.NONFINITE: ("other_run",),
        Kind.RNG: ("distribution", "mask", "seed", "state", "stream"),
        Kind.EXCEPTION: ("missing", "type"),
        Kind.CRASH: (
            *("backward", "compiling", "device", "differentiating", "exit"),
            *("fake", "hang", "memory", "running", "signal"),
        ),
        Kind.NONDETERMINISTIC: (),
        Kind.UNSUPPORTED: ("cache", "compiler", "disk", "files", "headers", "memory", "processes"),
    }
)
"""The words that may follow a kind and a dot."""

DETAILS = frozenset(f"{kind}.{finer}" for kind, some in FINER.items() for finer in some)
"""The finer kinds."""
