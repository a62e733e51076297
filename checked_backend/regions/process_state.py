"""The settings of the process and the thread that a compiled program must leave as eager leaves them.

Grad mode, the default dtype, deterministic algorithms, the number of threads and the like. A program that changes them
itself does so in eager too.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from checked_backend._torch.autograd import (
    autograd_threads,
    saved_tensor_hooks,
    set_autograd_threads,
    set_saved_tensor_hooks,
)
from checked_backend._torch.modes import (
    DisableTorchFunction,
    dispatch_modes,
    function_modes,
    set_dispatch_modes,
    set_function_modes,
    set_inference_mode,
)
from checked_backend._torch.settings import (
    FP32_PRECISIONS,
    check_sparse_invariants,
    default_device,
    fp32_precision,
    set_backend_flag,
    set_fp32_precision,
    sparse_invariants_checked,
)
from checked_backend.findings import EvidenceKey, Finding, Kind
from checked_backend.subjects import SubjectKind

__all__ = [
    "CHANGED_ELSEWHERE",
    "FILTERS",
    "GRAD_MODE",
    "ProcessState",
    "following",
    "is_setting",
    "of_process",
    "outlast_compiling",
    "settings_changed",
]


@dataclass(frozen=True, slots=True)
class _Setting:
    """One setting.

    Attributes:
        name: Part of the finding's subject.
        read: Gives its value, which can be compared.
        write: Sets it.
        of_thread: Whether each thread has its own, which the autograd engine sets back after each of its nodes.
    """

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], object]
    of_thread: bool = False


def _autocast(kind: str) -> _Setting:
    def read() -> tuple[bool, torch.dtype]:
        return torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)

    def write(value: tuple[bool, torch.dtype]) -> None:
        torch.set_autocast_enabled(kind, value[0])
        torch.set_autocast_dtype(kind, value[1])

    return _Setting(f"autocast.{kind}", read, write, of_thread=True)


def _autocast_nesting() -> int:
    torch.autocast_increment_nesting()
    return int(torch.autocast_decrement_nesting())


def _nest_autocast(depth: int) -> None:
    while _autocast_nesting() > depth:
        torch.autocast_decrement_nesting()
    while _autocast_nesting() < depth:
        torch.autocast_increment_nesting()


def _deterministic() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _flushes_denormals() -> bool:
    # there is nothing to ask; in this way a processor answers that flushes them
    least = sys.float_info.min
    return least / 2 == 0.0


def _legacy_precision() -> str | None:
    with suppress(RuntimeError):  # where only the newer settings were used, which are read too
        return torch.get_float32_matmul_precision()
    return None


def _set_legacy_precision(value: str | None) -> None:
    if value is not None:
        torch.set_float32_matmul_precision(value)


def _anomaly() -> tuple[bool, bool]:
    return torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()


def _set_filters(filters: Sequence[Any]) -> None:
    vars(warnings)["filters"][:] = filters
    warnings.simplefilter("default", append=True)  # this makes Python notice the change
    vars(warnings)["filters"][:] = filters


def _memory_filling() -> _Setting:
    owner: Any = torch.utils.deterministic
    name = "fill_uninitialized_memory"
    return _Setting(name, lambda: getattr(owner, name), lambda value: setattr(owner, name, value))


def _backend_flag(backend: str, name: str) -> _Setting:
    def read() -> bool:
        return bool(getattr(getattr(torch.backends, backend), name))

    return _Setting(f"{backend}.{name}", read, partial(set_backend_flag, backend, name))


def _precision(backend: str, operation: str) -> _Setting:
    return _Setting(
        f"fp32_precision.{backend}.{operation}",
        partial(fp32_precision, backend, operation),
        partial(set_fp32_precision, backend, operation),
    )


def _settings() -> Iterator[_Setting]:
    """All settings, in the order in which they are set: what changes others too comes before these."""
    yield _Setting("function_modes", function_modes, set_function_modes, of_thread=True)
    yield _Setting("dispatch_modes", dispatch_modes, set_dispatch_modes, of_thread=True)
    yield _Setting("inference_mode", torch.is_inference_mode_enabled, set_inference_mode, of_thread=True)
    yield _Setting("grad_mode", torch.is_grad_enabled, torch.set_grad_enabled, of_thread=True)
    yield _autocast("cpu")
    yield _autocast("cuda")
    yield _Setting("autocast.cache", torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled, of_thread=True)
    yield _Setting("autocast.nesting", _autocast_nesting, _nest_autocast)
    yield _Setting("default_dtype", torch.get_default_dtype, torch.set_default_dtype)
    yield _Setting("default_device", default_device, torch.set_default_device)
    yield _Setting(
        "deterministic", _deterministic, lambda value: torch.use_deterministic_algorithms(value[0], warn_only=value[1])
    )
    yield _memory_filling()
    yield _Setting("num_threads", torch.get_num_threads, torch.set_num_threads)
    yield _Setting("flush_denormal", _flushes_denormals, torch.set_flush_denormal)
    yield _Setting("float32_matmul_precision", _legacy_precision, _set_legacy_precision)
    for backend, operation in FP32_PRECISIONS:
        yield _precision(backend, operation)
    for name in ("enabled", "benchmark", "deterministic"):
        yield _backend_flag("cudnn", name)
    for name in ("enabled", "deterministic"):
        yield _backend_flag("mkldnn", name)
    cuda = torch.backends.cuda
    for name in (
        "allow_fp16_reduced_precision_reduction",
        "allow_bf16_reduced_precision_reduction",
        "allow_fp16_accumulation",
    ):
        yield _Setting(f"matmul.{name}", partial(getattr, cuda.matmul, name), partial(setattr, cuda.matmul, name))
    yield _Setting("sdp.flash", cuda.flash_sdp_enabled, cuda.enable_flash_sdp)
    yield _Setting("sdp.mem_efficient", cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp)
    yield _Setting("sdp.math", cuda.math_sdp_enabled, cuda.enable_math_sdp)
    yield _Setting("sdp.cudnn", cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp)
    mha: Any = torch.backends.mha
    yield _Setting("mha.fastpath", mha.get_fastpath_enabled, mha.set_fastpath_enabled)
    yield _Setting("autograd_threads", autograd_threads, set_autograd_threads, of_thread=True)
    yield _Setting("numpy_errors", np.geterr, lambda value: np.seterr(**value), of_thread=True)
    yield _Setting("anomaly_detection", _anomaly, lambda value: torch.autograd.set_detect_anomaly(*value))
    yield _Setting("sparse_invariants", sparse_invariants_checked, check_sparse_invariants)
    yield _Setting("warn_always", torch.is_warn_always_enabled, torch.set_warn_always)
    yield _Setting("saved_tensor_hooks", saved_tensor_hooks, set_saved_tensor_hooks, of_thread=True)
    yield _Setting("warnings_filters", lambda: tuple(warnings.filters), _set_filters)


_SETTINGS = tuple(_settings())

GRAD_MODE = "grad_mode"
"""The setting that a graph changes by itself: Dynamo does not repeat it around the graph."""

FILTERS = "warnings_filters"
"""The setting that importing a module, as compiling does, may change too."""

CHANGED_ELSEWHERE = frozenset({FILTERS, "anomaly_detection"})
"""Settings that another thread changes for a while, when it compiles with AOT autograd or imports a module."""

_FOLLOWING: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "inference_mode": ("grad_mode", "autograd_threads"),
        "autocast.cpu": ("autocast.nesting",),
        "autocast.cuda": ("autocast.nesting",),
        "float32_matmul_precision": ("fp32_precision.cuda.matmul", "fp32_precision.mkldnn.matmul"),
        "fp32_precision.generic.all": tuple(f"fp32_precision.{'.'.join(place)}" for place in FP32_PRECISIONS[1:]),
    }
)
"""Settings that change with another one. The other one is reported in their place."""

_PUT_BACK = frozenset({"default_dtype", "deterministic", "grad_mode", "inference_mode", "function_modes", FILTERS})
"""Settings that Dynamo sets back after it has compiled, and those that imports change."""


@dataclass(frozen=True, slots=True)
class ProcessState:
    """The settings at one moment.

    Attributes:
        values: The values, by the setting's name.
    """

    values: Mapping[str, Any]

    @classmethod
    def capture(cls) -> ProcessState:
        """Read them. Function modes of the user's are not asked."""
        with DisableTorchFunction():
            return cls({setting.name: setting.read() for setting in _SETTINGS})

    def restore(self, names: Collection[str] | None = None) -> None:
        """Set the settings back.

        Args:
            names: Names of the settings; None for all.
        """
        for setting in _SETTINGS:
            if (names is None or setting.name in names) and setting.read() != self.values[setting.name]:
                setting.write(self.values[setting.name])

    def moved(self, start: ProcessState, end: ProcessState) -> ProcessState:
        """This state with the changes between two other states."""
        changed = {name: value for name, value in end.values.items() if value != start.values[name]}
        return ProcessState({**self.values, **changed})

    def changed(self, after: ProcessState, *allowed: ProcessState) -> tuple[str, ...]:
        """Names of settings that differ afterwards, and are not as in an allowed state either.

        Args:
            after: The state that was left.
            allowed: Other states that are right.
        """
        right = (self, *allowed)
        return tuple(name for name, value in after.values.items() if all(value != one.values[name] for one in right))


def following(name: str) -> tuple[str, ...]:
    """The settings that change with this one."""
    return _FOLLOWING.get(name, ())


def of_process(names: Iterable[str]) -> tuple[str, ...]:
    """The settings among these that belong to the whole process.

    The others belong to a thread, and the autograd engine sets them back after each of its nodes.
    """
    own = {setting.name for setting in _SETTINGS if setting.of_thread}
    return tuple(name for name in names if name not in own)


def outlast_compiling(names: Iterable[str]) -> tuple[str, ...]:
    """The settings among these that Dynamo does not set back after a backend has compiled."""
    return tuple(name for name in names if name not in _PUT_BACK)


def settings_changed(
    names: Sequence[str], *, before: ProcessState, expected: ProcessState, actual: ProcessState, during: str = ""
) -> list[Finding]:
    """Findings about settings that the compiled program did not leave as eager does.

    Args:
        names: Names of the settings.
        expected: The state that eager left.
        actual: The state that the compiled program left.
        during: When it did so, if not in the call itself.
    """
    where = f", {during}" if during else ""
    found = []
    led = {one for name in names for one in following(name)}
    for name in names:
        if name in led:
            continue
        was = before.values[name]
        does = "leaves the setting {} as it was" if actual.values[name] == was else "changes the setting {}"
        eagers = "eager leaves it as it was" if expected.values[name] == was else "eager leaves another"
        found.append(
            Finding(
                kind=Kind.MUTATION,
                detail=f"mutation.{name.partition('.')[0]}",
                subject=f"state[{name}]",
                message=(
                    f"the compiled program {does.format(name)}{where}, and {eagers}: what runs after it in this "
                    "process runs otherwise. It was set to eager's"
                ),
                expected=_shown(name, expected),
                actual=_shown(name, actual),
                evidence={EvidenceKey.BEFORE_CALL: _shown(name, before)},
            )
        )
    return found


def is_setting(finding: Finding) -> bool:
    """Whether a finding is about a setting, and so about no tensor."""
    return finding.about.kind is SubjectKind.STATE


def _shown(name: str, state: ProcessState) -> str:
    value = state.values[name]
    if name == FILTERS:
        first = " ".join(str(part) for part in value[0]) if value else "none"
        return f"{len(value)} filters, the first of them: {first}"
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "none"
    return str(value)
