"""The settings by which numbers change, which a compiled program must leave as eager leaves them.

Grad mode, the default dtype, deterministic algorithms, the number of threads and the like. A program that changes them
itself does so in eager too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from checked_backend._torch.dynamo import compile_lock
from checked_backend._torch.modes import DisableTorchFunction, set_inference_mode
from checked_backend._torch.settings import (
    FP32_PRECISIONS,
    backend_flag,
    default_device,
    fp32_precision,
    set_backend_flag,
    set_fp32_precision,
)
from checked_backend.findings import EvidenceKey, Finding, Kind, Skip


class _Setting(NamedTuple):
    name: str
    read: Callable[[], Any]
    write: Callable[[Any], object]


_AUTOCAST_DEVICES = ("cpu", "cuda", "mps", "xpu")


def _autocast(kind: str) -> _Setting:
    def read() -> tuple[bool, torch.dtype]:
        return torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)

    def write(value: tuple[bool, torch.dtype]) -> None:
        torch.set_autocast_enabled(kind, value[0])
        torch.set_autocast_dtype(kind, value[1])

    return _Setting(f"autocast.{kind}", read, write)


def _autocast_nesting() -> int:
    """How many blocks of autocast this thread is in."""
    torch.autocast_increment_nesting()
    return int(torch.autocast_decrement_nesting())


def _nest_autocast(depth: int) -> None:
    while _autocast_nesting() > depth:
        torch.autocast_decrement_nesting()
    while _autocast_nesting() < depth:
        torch.autocast_increment_nesting()


def _deterministic() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _legacy_precision() -> str | None:
    with suppress(RuntimeError):  # where only the newer settings were used, which are read too
        return torch.get_float32_matmul_precision()
    return None


def _set_legacy_precision(value: str | None) -> None:
    if value is not None:
        torch.set_float32_matmul_precision(value)


_REDUCED = "reduced_precision_reduction"
_FLAGS = (
    *(("cudnn", name) for name in ("enabled", "benchmark", "deterministic")),
    *(("mkldnn", name) for name in ("enabled", "deterministic")),
    *(("cuda.matmul", f"allow_{name}") for name in (f"fp16_{_REDUCED}", f"bf16_{_REDUCED}", "fp16_accumulation")),
)


def _settings() -> Iterator[_Setting]:
    """All settings, in the order in which they are set: what changes others too comes before these."""
    yield _Setting("inference_mode", torch.is_inference_mode_enabled, set_inference_mode)
    yield _Setting("grad_mode", torch.is_grad_enabled, torch.set_grad_enabled)
    yield from map(_autocast, _AUTOCAST_DEVICES)
    yield _Setting("autocast.nesting", _autocast_nesting, _nest_autocast)
    yield _Setting("default_dtype", torch.get_default_dtype, torch.set_default_dtype)
    yield _Setting("default_device", default_device, torch.set_default_device)
    yield _Setting(
        "deterministic", _deterministic, lambda value: torch.use_deterministic_algorithms(value[0], warn_only=value[1])
    )
    yield _Setting("num_threads", torch.get_num_threads, torch.set_num_threads)
    # torch has no function that tells
    yield _Setting("flush_denormal", lambda: sys.float_info.min / 2 == 0.0, torch.set_flush_denormal)
    yield _Setting("float32_matmul_precision", _legacy_precision, _set_legacy_precision)
    for place in FP32_PRECISIONS:
        name = f"fp32_precision.{'.'.join(place)}"
        yield _Setting(name, partial(fp32_precision, *place), partial(set_fp32_precision, *place))
    for backend, name in _FLAGS:
        read, write = partial(backend_flag, backend, name), partial(set_backend_flag, backend, name)
        yield _Setting(f"{backend.removeprefix('cuda.')}.{name}", read, write)
    cuda: Any = torch.backends.cuda
    for name in ("flash", "mem_efficient", "math", "cudnn"):
        yield _Setting(f"sdp.{name}", getattr(cuda, f"{name}_sdp_enabled"), getattr(cuda, f"enable_{name}_sdp"))


_SETTINGS = tuple(_settings())

_GRAD_MODE = "grad_mode"

MODES = frozenset({_GRAD_MODE, "inference_mode", *(f"autocast.{kind}" for kind in _AUTOCAST_DEVICES)})
"""Settings of which each thread has its own, which the autograd engine sets back after each of its nodes."""

FOLLOWING: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "inference_mode": (_GRAD_MODE,),
        **{f"autocast.{kind}": ("autocast.nesting",) for kind in _AUTOCAST_DEVICES},
        "float32_matmul_precision": ("fp32_precision.cuda.matmul", "fp32_precision.mkldnn.matmul"),
        "fp32_precision.generic.all": tuple(f"fp32_precision.{'.'.join(place)}" for place in FP32_PRECISIONS[1:]),
    }
)
"""Settings that change with another one. The other one is reported in their place."""

SET_BACK_BY_DYNAMO = frozenset({"default_dtype", "deterministic", _GRAD_MODE, "inference_mode"})
"""Settings that Dynamo sets back after it has compiled."""


@dataclass(frozen=True, slots=True)
class ProcessState:
    """The settings at one moment."""

    values: Mapping[str, Any]

    @classmethod
    def capture(cls, names: Collection[str] | None = None) -> ProcessState:
        """Read them; None for all. Function modes of the user's are not asked."""
        with DisableTorchFunction():
            return cls({one.name: one.read() for one in _SETTINGS if names is None or one.name in names})

    def restore(self, names: Collection[str] | None = None) -> None:
        """Set the settings back; None for all."""
        for setting in _SETTINGS:
            if setting.name in (self.values if names is None else names):
                value = self.values[setting.name]
                if setting.read() != value:
                    setting.write(value)

    def moved(self, start: ProcessState, end: ProcessState) -> ProcessState:
        """This state with the changes between two other states."""
        changed = {name: value for name, value in end.values.items() if value != start.values[name]}
        return ProcessState({**self.values, **changed})

    def changed(self, after: ProcessState, *allowed: ProcessState) -> tuple[str, ...]:
        """Names of settings that differ afterwards, and are not as in an allowed state either."""
        right = (self, *allowed)
        return tuple(name for name, value in after.values.items() if all(value != one.values[name] for one in right))


def check_settings(
    before: ProcessState,
    expected: ProcessState,
    after: ProcessState,
    *,
    again: Callable[[], object],
    skip: Callable[[Skip], None],
    others_ran: bool,
    ran: bool = False,
    backward: bool = False,
) -> list[Finding]:
    """Findings about settings that a candidate left. These are set to eager's, those of another thread's stay.

    When the user's program changes a mode, Dynamo makes that change in its own code around the graph, or in the graph,
    from which AOT autograd removes it. So the settings before the call are right, and those that eager left are right.
    Grad mode alone is changed by the graph and by nothing around it: there only what eager left is right.

    Args:
        expected: The state that eager left.
        after: The state that the candidate left.
        again: Runs the candidate once more, on copies.
        skip: Notes settings that could not be decided about.
        others_ran: Whether another thread ran meanwhile.
        ran: Whether eager ran to the graph's end, so that `expected` has what the graph changes.
        backward: Whether it is about the backward pass, after which the autograd engine sets back what is a thread's.
    """
    names = dict.fromkeys(before.changed(after, expected))
    if ran and expected.values[_GRAD_MODE] != after.values[_GRAD_MODE]:
        names = {_GRAD_MODE: None, **names}
    if backward:
        names = {name: None for name in names if name not in MODES}
    doubtful = names.keys() - MODES if others_ran else set()
    if doubtful:
        doubtful -= _changed_again(again, expected, doubtful)
    for name in sorted(doubtful):
        why = "it was changed once, and not when the compiled region ran again; another thread ran meanwhile"
        skip(Skip(f"state[{name}]", why, matters=True))
    certain = [name for name in names if name not in doubtful]
    expected.restore(certain)
    during = ", in its backward pass" if backward else ""
    return settings_changed(certain, before=before, expected=expected, actual=after, during=during)


def _changed_again(again: Callable[[], object], expected: ProcessState, names: Collection[str]) -> set[str]:
    """Which settings the candidate changes when it runs again, from eager's; they are left as they are."""
    with compile_lock:  # no other thread compiles meanwhile, and changes what compiling changes for a while
        now = ProcessState.capture()
        expected.restore(names)
        start = ProcessState.capture()
        try:
            with suppress(Exception):  # as it did before, or what this run lacks: the settings say what they say
                again()
        finally:
            changed = start.changed(ProcessState.capture())
            start.restore(changed)
            now.restore(names)
    return set(changed)


def settings_changed(
    names: Collection[str], *, before: ProcessState, expected: ProcessState, actual: ProcessState, during: str = ""
) -> list[Finding]:
    """Findings about settings that the compiled program did not leave as eager does.

    Args:
        during: When it did so, if not in the call itself: ", while it is compiled".
    """
    findings = []
    for name in names:
        if any(name in FOLLOWING.get(leader, ()) for leader in names):
            continue
        values = (before.values[name], expected.values[name], actual.values[name])
        was, eager, compiled = (", ".join(map(str, v)) if isinstance(v, tuple) else str(v) for v in values)
        does = f"leaves the setting {name} as it was" if compiled == was else f"changes the setting {name}"
        message = (
            f"the compiled program {does}{during}, and eager leaves {'it as it was' if eager == was else 'another'}: "
            "code that runs later in this process is affected; numcheck has restored the value that eager leaves"
        )
        subject, detail = f"state[{name}]", f"mutation.{name.partition('.')[0]}"
        found = Finding(Kind.MUTATION, subject, message, detail, expected=eager, actual=compiled)
        findings.append(replace(found, evidence={EvidenceKey.BEFORE_CALL: was}))
    return findings
