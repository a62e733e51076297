"""``memory_efficient_fusion``: recompute cheap values in the backward pass, and save less."""

from __future__ import annotations

import inspect
from typing import Any, TypeVar

import torch

from checked_backend._torch.aot import aot_function, aot_module
from checked_backend.aot.boxed import AotCompiler
from checked_backend.aot.decompositions import decomposition_table
from checked_backend.aot.partition import partition_function
from checked_backend.aot_compilers.inductor import inductor
from checked_backend.errors import OptionError

_CallableT = TypeVar("_CallableT")


def memory_efficient_fusion(fn_or_module: _CallableT, **overrides: Any) -> _CallableT:
    """Compile forward and backward with the min-cut partitioner, which recomputes in backward to save memory.

    The graphs are traced at the first call. From then on the sizes are fixed, and so are the inputs that require grad.

    Source: ``memory_efficient_fusion`` of ``torch/_functorch/compilers.py``, whose nvFuser is gone.

    Args:
        fn_or_module: A function of tensors, or a module.
        overrides: Arguments of ``functorch.compile.aot_function`` that replace the defaults: ``fw_compiler`` (Inductor)
            with ``bw_compiler`` and ``inference_compiler`` (the same), ``partition_fn`` (min-cut), ``decompositions``
            (Inductor's if it compiles the forward graph, else the table ``default``).

    Returns:
        A function, or a module that shares the given module's parameters.

    Raises:
        OptionError: ``aot_function`` does not take an override, or a compiler or ``fn_or_module`` cannot be called.
    """
    if not callable(fn_or_module):
        raise OptionError(f"memory_efficient_fusion got {fn_or_module!r}, which cannot be called.")
    valid = [name for name in list(inspect.signature(aot_function).parameters)[1:] if not name.startswith("_")]
    for name in overrides:
        if name not in valid:
            raise OptionError(f"memory_efficient_fusion has no override {name!r}. Valid: {', '.join(sorted(valid))}.")
        given = overrides[name]
        if name.endswith("_compiler") and not callable(given) and (given is not None or name == "fw_compiler"):
            raise OptionError(
                f"memory_efficient_fusion: {name} got {given!r}. It is a compiler (gm, example_inputs) -> "
                "callable, for example one of checked_backend.aot_compilers."
            )
    compiler: AotCompiler = overrides.pop("fw_compiler", inductor)
    settings: dict[str, Any] = {
        "fw_compiler": compiler,
        "bw_compiler": compiler,
        "inference_compiler": compiler,
        "partition_fn": partition_function("min_cut"),
        "decompositions": decomposition_table("inductor" if compiler is inductor else "default"),
        **overrides,
    }
    compiled: Any = aot_module if isinstance(fn_or_module, torch.nn.Module) else aot_function
    result: _CallableT = compiled(fn_or_module, **settings)
    return result
