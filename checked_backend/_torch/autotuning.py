"""How Inductor chooses among kernels: it measures them, and takes the fastest."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

__all__ = ["Autotuning", "watch_autotuning"]

_LEAST = 1e-9
"""Milliseconds that any kernel takes, so that no time is 0."""


@dataclass(slots=True)
class Autotuning:
    """What Inductor has measured and chosen.

    Attributes:
        measured: How many kernels it has measured.
        chosen: The kernel that it chose, by what the kernel is for.
    """

    measured: int = 0
    chosen: dict[str, str] = field(default_factory=dict)


@contextmanager
def watch_autotuning(retime: Callable[[float], float] = lambda ms: ms) -> Iterator[Autotuning]:
    """See what Inductor measures and chooses, and let it choose by other times than the measured ones.

    Every measurement of this process goes through one object, ``torch._inductor.runtime.benchmarking.benchmarker``, so
    that templates of matrix products, configurations of Triton kernels, fusions and paddings are all chosen this way.
    Measuring in other processes is turned off. torch's own ``test_configs.distort_benchmarking_result`` is read when
    torch is imported, and does not reach CPU kernels.

    Args:
        retime: Makes the time that Inductor is told of a measured time; both in milliseconds. A kernel that could not
            be measured (its time is not finite) stays so.
    """
    from torch._inductor import config  # noqa: PLC0415  Inductor is slow to import
    from torch._inductor.runtime.benchmarking import benchmarker  # noqa: PLC0415
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner  # noqa: PLC0415
    from torch._inductor.select_algorithm import get_algorithm_selector_cache  # noqa: PLC0415

    seen = Autotuning()
    inside = threading.local()
    names = [name for name in dir(type(benchmarker)) if name.startswith("benchmark")]

    def told(time: Any) -> Any:
        if isinstance(time, list | tuple):
            return type(time)(map(told, time))
        return retime(max(time, _LEAST)) if time < float("inf") else time

    def measure(real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if getattr(inside, "busy", False):  # one way of measuring calls another
            return real(*args, **kwargs)
        inside.busy = True
        try:
            time = real(*args, **kwargs)
        finally:
            inside.busy = False
        seen.measured += 1
        return told(time)

    def of_template(timings: Mapping[Any, float], name: str, inputs: Any, *_more: Any) -> None:
        with suppress(Exception):  # a name that cannot be told is no fault of what compiles here
            best = min(timings, key=lambda choice: timings[choice])
            dtypes = {str(node.get_dtype()).removeprefix("torch.") for node in inputs}
            seen.chosen[f"{name} of {', '.join(sorted(dtypes))}"] = _named(best)

    def of_triton(real: Callable[..., Any], tuner: Any, *args: Any, **kwargs: Any) -> Any:
        launcher = real(tuner, *args, **kwargs)
        with suppress(Exception):
            best = launcher if launcher is not None else tuner.launchers[0]
            seen.chosen[tuner.inductor_meta["kernel_name"]] = str(best.config)
        return launcher

    off = {name: False for name in ("autotune_in_subproc", "pipeline_max_autotune_gemm") if hasattr(config, name)}
    savers = get_algorithm_selector_cache()
    with ExitStack() as stack:
        stack.enter_context(config.patch(off))
        for name in names:
            stack.enter_context(_replaced(benchmarker, name, partial(measure, getattr(benchmarker, name))))
        for name in ("autotune_to_one_config", "coordinate_descent_tuning"):
            stack.enter_context(_replaced(CachingAutotuner, name, _method(of_triton, getattr(CachingAutotuner, name))))
        savers.add_feedback_saver(of_template)
        try:
            yield seen
        finally:
            with suppress(ValueError):  # the program may have cleared them
                savers.feedback_saver_fns.remove(of_template)


def _method(watch: Callable[..., Any], real: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return watch(real, self, *args, **kwargs)

    return method


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute. Where the object has it from its class, it has it from there again afterwards."""
    own = name in vars(owner)
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


def _named(choice: Any) -> str:
    """A kernel and its configuration."""
    name, about = str(getattr(choice, "name", choice)), str(getattr(choice, "description", ""))
    return f"{name} ({about})" if about else name
