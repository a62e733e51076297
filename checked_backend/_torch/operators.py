"""Operators: finding them by name, their kernels and decompositions, and who registered them."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch._decomp
import torch._functorch.eager_transforms
import torch._functorch.predispatch
import torch._library.custom_ops
import torch.amp.autocast_mode
import torch.autograd.forward_ad
import torch.autograd.grad_mode
from torch._decomp import core_aten_decompositions, get_decompositions
from torch._library.simple_registry import singleton as _library_registry
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket, _OpNamespace

__all__ = [
    "HigherOrderOperator",
    "OpOverload",
    "OpOverloadPacket",
    "OperatorDefinition",
    "core_aten_decompositions",
    "custom_op_module",
    "decomposition",
    "fake_kernel",
    "find_op_packet",
    "get_decompositions",
    "grouped_mm_functions",
    "has_dispatched",
    "higher_order_kernel",
    "homes_of_operators",
    "internal_functions",
    "is_composite",
    "is_writing_out",
    "operator_definition",
    "operator_names",
    "registered_operators",
    "registering_module",
    "registration_file",
    "run_composite",
    "triton_kernel",
]

# The keys of devices. Nested and sparse tensors have other keys, with kernels for operators that are compositions else.
_DEVICE_KEYS = ("CPU", "CUDA", "XPU", "MPS", "HPU", "MTIA", "PrivateUse1")


def is_composite(op: OpOverload) -> bool:
    """Whether an operator is only a composition of others, which run in its place (visible under inference mode)."""
    # op._can_decompose() also finds decompositions written in Python, which eager never runs. And some compositions
    # serve only devices without a kernel of their own (silu_backward): a device's own kernel rounds in another way.
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    if not has_kernel(op.name(), "CompositeImplicitAutograd"):
        return False
    return not any(has_kernel(op.name(), key) for key in _DEVICE_KEYS)


def run_composite(op: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Run a composite operator's own kernel, so that modes see the operators that it is made of."""
    return op._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


@functools.cache  # torch searches all its operators each time
def decomposition(op: OpOverload) -> Callable[..., Any]:
    """The function by which torch decomposes an operator.

    Raises:
        KeyError: It has no decomposition.
    """
    made: Callable[..., Any] = get_decompositions([op])[op]
    return made


def grouped_mm_functions() -> tuple[Callable[..., Any], ...]:
    """The ways in which a graph can ask for a grouped matrix product."""
    op = torch.ops.aten._grouped_mm
    return torch._grouped_mm, torch.nn.functional.grouped_mm, op, op.default


def higher_order_kernel(op: HigherOrderOperator) -> Callable[..., Any] | None:
    """The eager implementation of a higher-order operator, which calls its bodies as Python; None if it has none."""
    kernel = op.py_kernels.get(torch._C.DispatchKey.CompositeExplicitAutograd)
    return kernel if callable(kernel) else None


def fake_kernel(op: OpOverload) -> tuple[Callable[..., Any] | None, str]:
    """The Python function that computes an operator's metadata, and the kind of that function.

    Returns:
        The function, or None if it is written in C++; and what it is called, for people.
    """
    find = getattr(_library_registry, "get", None) or _library_registry._data.get  # no ``get`` before torch 2.12
    entry = find(op.name())
    kernel = None if entry is None else entry.fake_impl.kernel
    if kernel is not None:
        return _registered(kernel.func), "register_fake"
    function = op.py_kernels.get(torch._C.DispatchKey.Meta)
    if not callable(function):
        function = torch._decomp.meta_table.get(op)
    if callable(function):
        return function, "Python meta function"
    function = torch._decomp.decomposition_table.get(op)
    if callable(function):
        return function, "decomposition, which computes its metadata,"
    return None, "meta kernel"


def _registered(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function that a user registered, without the wrappers that ``torch.library`` puts around it."""
    while getattr(function, "__module__", "") in ("torch.library", "torch._library.custom_ops"):
        names = getattr(getattr(function, "__code__", None), "co_freevars", ())
        cells = dict(zip(names, getattr(function, "__closure__", None) or (), strict=False))
        around = [cells[name].cell_contents for name in ("func", "self") if name in cells]
        inner = getattr(around[0], "_abstract_fn", around[0]) if around else None
        if not callable(inner):
            return function
        function = inner
    return function


def find_op_packet(namespace: str, name: str) -> OpOverloadPacket | HigherOrderOperator | None:
    """The registered operator of this name, or None. Other attributes of ``torch.ops`` are not found."""
    home = getattr(torch.ops, namespace, None)
    if namespace != "higher_order" and not isinstance(home, _OpNamespace):
        return None
    packet = getattr(home, name, None)
    return packet if isinstance(packet, (OpOverloadPacket, HigherOrderOperator)) else None


_FUNCTORCH = (
    "_add_batch_dim _grad_decrement_nesting _grad_increment_nesting _jvp_decrement_nesting _jvp_increment_nesting "
    "_remove_batch_dim _unwrap_for_grad _vmap_decrement_nesting _vmap_increment_nesting _wrap_for_grad "
    "set_inplace_requires_grad_allowed"
)


_PREDISPATCH = (
    "_add_batch_dim _enter_dual_level _exit_dual_level _jvp_decrement_nesting _jvp_increment_nesting _make_dual "
    "_remove_batch_dim _unpack_dual _unwrap_for_grad _vmap_decrement_nesting _vmap_increment_nesting "
    "lazy_load_decompositions"
)


def internal_functions() -> dict[str, Callable[..., Any]]:
    """Internal functions that Dynamo writes into graphs, by ``module:name``.

    They only set modes, open and close levels of `torch.func`'s transforms, and count calls.
    """
    homes: dict[str, tuple[Any, str]] = {
        "torch._C": (
            torch._C,
            "_enter_dual_level _exit_dual_level _log_api_usage_once _set_fwd_grad_enabled _set_grad_enabled",
        ),
        "torch._C._autograd": (
            torch._C._autograd,
            "_get_data_attr _saved_tensors_hooks_disable _saved_tensors_hooks_enable",
        ),
        "torch._C._functorch": (torch._C._functorch, _FUNCTORCH),
        "torch._C._nn": (torch._C._nn, "_parse_to"),
        "torch._functorch.eager_transforms": (
            torch._functorch.eager_transforms,
            "_autograd_grad _set_tensor_requires_grad",
        ),
        "torch._functorch.predispatch": (torch._functorch.predispatch, _PREDISPATCH),
        "torch.amp.autocast_mode": (torch.amp.autocast_mode, "_enter_autocast _exit_autocast"),
        "torch.autograd.forward_ad": (torch.autograd.forward_ad, "_maybe_load_decompositions"),
        "torch.autograd.grad_mode": (torch.autograd.grad_mode, "_enter_inference_mode _exit_inference_mode"),
    }
    return {
        f"{home}:{name}": function
        for home, (module, names) in homes.items()
        for name in names.split()
        if callable(function := getattr(module, name, None))
    }


def homes_of_operators() -> dict[str, tuple[Any, str]]:
    """The modules and classes whose functions are ATen operators, each with the prefix of their names in ATen."""
    bindings: Any = torch._C
    return {
        "torch": (torch, ""),
        "torch.Tensor": (torch.Tensor, ""),
        "torch.functional": (torch.functional, ""),
        "torch.nn.functional": (torch.nn.functional, ""),
        "torch.fft": (torch.fft, "fft_"),
        "torch.linalg": (torch.linalg, "linalg_"),
        "torch.special": (torch.special, "special_"),
        "torch._C._nn": (bindings._nn, ""),
        "torch._C._fft": (bindings._fft, ""),
        "torch._C._linalg": (bindings._linalg, ""),
        "torch._C._special": (bindings._special, ""),
    }


def operator_names(namespace: str) -> frozenset[str]:
    """The names of all operators in a namespace of ``torch.ops``, without the namespace."""
    names = (str(schema.name).partition("::") for schema in torch._C._jit_get_all_schemas())
    return frozenset(name for home, _, name in names if home == namespace)


def registered_operators() -> frozenset[str]:
    """The operators that are registered now, as ``namespace::name``."""
    return frozenset(str(name).partition(".")[0] for name in torch._C._dispatch_get_all_op_names())


def has_dispatched(overload: OpOverload) -> bool:
    """Whether the dispatcher knows an operator. TorchScript has others, for text, dictionaries and classes."""
    return bool(torch._C._dispatch_has_kernel(overload.name()))


def is_writing_out(overload: OpOverload) -> bool:
    """Whether an operator writes its results to tensors that the caller passes by keyword, such as ``out``."""
    return any(one.kwarg_only and one.is_write for one in overload._schema.arguments)


def registration_file(name: str) -> str:
    """The source file that registered ``namespace::name``; empty if it is not known."""
    lines = str(torch._C._dispatch_dump(name)).splitlines()
    found = next((line for line in lines if line.startswith("debug: registered at ")), "")
    return found.removeprefix("debug: registered at ").rpartition(":")[0]


def custom_op_module(name: str) -> str | None:
    """The Python module that registered ``namespace::name`` with ``torch.library.custom_op``; None if unknown."""
    definition = torch._library.custom_ops.OPDEFS.get(name)
    return None if definition is None else str(definition._init_fn.__module__)


def registering_module(op: OpOverload) -> str | None:
    """The Python module that registered an operator in any way, or its fake kernel; None if unknown."""
    home = custom_op_module(op._schema.name) or getattr(fake_kernel(op)[0], "__module__", None)
    if home is not None:
        return str(home)
    file = registration_file(op._schema.name)
    return next((name for name, module in sys.modules.items() if getattr(module, "__file__", None) == file), None)


@dataclass(frozen=True, slots=True)
class OperatorDefinition:
    """What ``torch.library.custom_op`` was given for an operator.

    Attributes:
        fake: What tells its result's metadata; None if there is none.
        setup: What keeps values for the gradient.
        more: What else it was given, which a script cannot repeat.
    """

    name: str
    schema: str
    mutated: tuple[str, ...]
    function: Callable[..., Any]
    fake: Callable[..., Any] | None
    backward: Callable[..., Any] | None
    setup: Callable[..., Any] | None
    more: str


def operator_definition(found: object) -> OperatorDefinition | None:
    """The definition of a custom operator, by its name or by what ``custom_op`` returned; None for anything else."""
    definition: Any = torch._library.custom_ops.OPDEFS.get(found) if isinstance(found, str) else found
    if not isinstance(definition, torch._library.custom_ops.CustomOpDef):
        return None
    arguments = definition._opoverload._schema.arguments
    rules = {
        "kernels for several devices": len(definition._backend_fns) > 1,
        "a rule for vmap": definition._vmap_fn,
        "rules for subclasses of tensors": definition._torch_dispatch_fns,
        "a rule for autocast": getattr(definition, "_autocast_dtype", None),
    }
    more = next((rule for rule, given in rules.items() if given), "")
    return OperatorDefinition(
        definition._qualname,
        definition._schema,
        tuple(one.name for one in arguments if one.alias_info is not None and one.alias_info.is_write),
        definition._init_fn,
        definition._abstract_fn,
        definition._backward_fn,
        definition._setup_context_fn,
        more,
    )


def triton_kernel(index: int) -> str:
    """``module:name`` of a Triton kernel, given its index in the table of the process. A graph holds only the index."""
    kernel = torch._higher_order_ops.triton_kernel_wrap.kernel_side_table.get_kernel(index)
    function = getattr(kernel, "fn", kernel)
    function = getattr(function, "fn", function)  # an autotuner around the kernel
    return f"{getattr(function, '__module__', '?')}:{getattr(function, '__qualname__', '?')}"
