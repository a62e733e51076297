"""How Inductor chooses among kernels: it measures them, and takes the fastest."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

_LEAST = 1e-9
"""Milliseconds that any kernel takes, so that no time is 0."""


@dataclass(slots=True)
class Autotuning:
    """What Inductor has measured and chosen.

    Attributes:
        chosen: The kernel that it chose, by what the kernel is for.
    """

    measured: int = 0
    chosen: dict[str, str] = field(default_factory=dict)

    def note(self, purpose: str, kernel: str) -> None:
        """Note a choice. Another kernel for what has one already is another choice."""
        place, number = purpose, 1
        while self.chosen.get(place, kernel) != kernel:
            number += 1
            place = f"{purpose} ({number})"
        self.chosen[place] = kernel


Retime = Callable[[float, str], float]
"""Makes the time that Inductor is told of a measured time, both in milliseconds, and the kernel's name."""


@contextmanager
def watch_autotuning(retime: Retime = lambda ms, _kernel: ms) -> Iterator[Autotuning]:
    """See what Inductor measures and chooses, and let it choose by other times than the measured ones.

    Every measurement of this process goes through one object, ``torch._inductor.runtime.benchmarking.benchmarker``, so
    that templates of matrix products, configurations of Triton kernels, fusions and paddings are all chosen this way.
    Measuring in other processes is turned off. torch's own ``test_configs.distort_benchmarking_result`` is read when
    torch is imported, and does not reach CPU kernels.

    Args:
        retime: Makes the times. A kernel that could not be measured (its time is not finite) stays so. Where it is not
            known what is measured, the name is "".
    """
    from torch._inductor import config  # noqa: PLC0415  Inductor is slow to import
    from torch._inductor.runtime.benchmarking import benchmarker  # noqa: PLC0415
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner  # noqa: PLC0415
    from torch._inductor.select_algorithm import (  # noqa: PLC0415
        AlgorithmSelectorCache,
        get_algorithm_selector_cache,
    )

    seen = Autotuning()
    now = _Now()

    def told(time: Any) -> Any:
        if isinstance(time, list | tuple):
            return type(time)(map(told, time))
        return retime(max(time, _LEAST), now.kernel) if time < float("inf") else time

    def measure(real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if now.busy:  # one way of measuring calls another
            return real(*args, **kwargs)
        now.busy = True
        try:
            time = real(*args, **kwargs)
        finally:
            now.busy = False
        seen.measured += 1
        return told(time)

    def of_template(timings: Mapping[Any, float], name: str, inputs: Any, *_more: Any) -> None:
        with suppress(Exception):  # a name that cannot be told is no fault of what compiles here
            best = min(timings, key=lambda choice: timings[choice])
            dtypes = {str(node.get_dtype()).removeprefix("torch.") for node in inputs}
            sizes = ["x".join(map(str, node.get_size())) for node in inputs]
            seen.note(f"{name} of {', '.join(sorted(dtypes))} {', '.join(sizes)}", _named(best))

    def of_triton(real: Callable[..., Any], tuner: Any, *args: Any, **kwargs: Any) -> Any:
        launcher = real(tuner, *args, **kwargs)
        with suppress(Exception):
            best = launcher if launcher is not None else tuner.launchers[0]
            seen.note(tuner.inductor_meta["kernel_name"], str(best.config))
        return launcher

    def one_template(real: Callable[..., Any], choice: Any, *args: Any, **kwargs: Any) -> Any:
        with now.measuring(_named(choice, numbered=False)):
            return real(choice, *args, **kwargs)

    def one_configuration(real: Callable[..., Any], tuner: Any, launcher: Any, *args: Any, **kwargs: Any) -> Any:
        with now.measuring(str(getattr(launcher, "config", ""))):
            return real(tuner, launcher, *args, **kwargs)

    off = {name: False for name in ("autotune_in_subproc", "pipeline_max_autotune_gemm") if hasattr(config, name)}
    savers = get_algorithm_selector_cache()
    with ExitStack() as stack:
        stack.enter_context(config.patch(off))
        for name in dir(type(benchmarker)):
            if name.startswith("benchmark"):
                stack.enter_context(_replaced(benchmarker, name, partial(measure, getattr(benchmarker, name))))
        for name, watch in (
            ("autotune_to_one_config", of_triton),
            ("coordinate_descent_tuning", of_triton),
            ("bench", one_configuration),
        ):
            stack.enter_context(_replaced(CachingAutotuner, name, _method(watch, getattr(CachingAutotuner, name))))
        of_one = partial(one_template, AlgorithmSelectorCache.benchmark_choice)  # a class method
        stack.enter_context(_replaced(AlgorithmSelectorCache, "benchmark_choice", staticmethod(of_one)))
        savers.add_feedback_saver(of_template)
        try:
            yield seen
        finally:
            with suppress(ValueError):  # the program may have cleared them
                savers.feedback_saver_fns.remove(of_template)


class _Now(threading.local):
    """What this thread measures.

    Attributes:
        kernel: The kernel's name; "" if it is not known.
    """

    busy = False
    kernel = ""

    @contextmanager
    def measuring(self, kernel: str) -> Iterator[None]:
        """The block measures this kernel."""
        before, self.kernel = self.kernel, kernel
        try:
            yield
        finally:
            self.kernel = before


def _method(watch: Callable[..., Any], real: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return watch(real, self, *args, **kwargs)

    return method


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute. Where the object has it from its class, it has it from there again afterwards."""
    own = name in vars(owner)
    before = vars(owner)[name] if own else None  # a class method as it stands there
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


def _named(choice: Any, *, numbered: bool = True) -> str:
    """A kernel and its configuration. Inductor numbers its templates from compilation to compilation."""
    name, about = str(getattr(choice, "name", choice)), str(getattr(choice, "description", ""))
    name = name if numbered else re.sub(r"_\d+$", "", name)
    return f"{name} ({about})" if about else name
