"""What a node of a graph calls, as text, and back: only names on a list, and operators that are registered here.

A dump may come from a stranger. Its text is never imported, evaluated or looked up by attribute: it is a key of a table
of functions that compute, or the name of an operator in torch's own registry.
"""

from __future__ import annotations

import builtins
import functools
import math
import operator
import re
import sys
import warnings
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch.overrides import get_overridable_functions

from checked_backend._torch import (
    HigherOrderOperator,
    OpOverload,
    OpOverloadPacket,
    custom_op_module,
    find_op_packet,
    internal_functions,
)

__all__ = [
    "Unresolved",
    "attribute_allowed",
    "checked_target",
    "encode_target",
    "is_importable",
    "known_function",
    "needed_import",
    "resolve_target",
]

_NAME = r"[A-Za-z_][A-Za-z0-9_]*"
_OP = re.compile(rf"op:({_NAME})\.({_NAME})\.({_NAME})")
_PACKET = re.compile(rf"(?:packet|higher_order):({_NAME}(?:\.{_NAME})?)")
_FUNCTION = re.compile(rf"function:({_NAME}(?:\.{_NAME})*):({_NAME}(?:\.{_NAME})*)")
_METHOD = re.compile(rf"method:({_NAME})")

_BUILT_IN = frozenset({"aten", "prims", "prim", "quantized", "inductor", "higher_order", "profiler", "rngprims"})
_TEXT = re.compile(r"\bstr\b")
_FILE_ARGUMENT = re.compile(r"file|path|folder|dir$|ur[il]$")
# They open files, or call what they are given. Those of other libraries are found by the names of their arguments.
_FORBIDDEN_OPS = frozenset(
    {
        "aten.from_file",
        "aten.save",
        "debugprims.load_tensor",
        "image.read_file",
        "image.write_file",
        # they take the caller's word for where a tensor's memory ends
        "inductor._alloc_from_pool",
        "inductor._reinterpret_tensor",
        "aten._index_put_impl_",
        "aten._index_put_impl",
    }
)
_UNCHECKED = re.compile(r"_tensor_unsafe$|^aten\._?unsafe_(set|resize)")
_FORBIDDEN_METHODS = frozenset(
    {"apply_", "map_", "map2_", "register_hook", "register_post_accumulate_grad_hook", "share_memory_", "module_load"}
)
_FORBIDDEN_FUNCTIONS = frozenset({"torch:from_file", "torch:compile", "torch:load", "torch:save"})
# Kernels and objects that only live in the process that traced them.
_PROCESS_BOUND = ("triton_kernel_wrap", "call_torchbind", "aoti_call_delegate", "executorch_call_delegate")

_FACTORIES = (
    "arange as_tensor asarray bartlett_window blackman_window broadcast_shapes complex empty empty_permuted "
    "empty_strided eye full hamming_window hann_window kaiser_window linspace logspace normal ones promote_types rand "
    "randint randn randperm range result_type scalar_tensor sparse_coo_tensor sparse_csr_tensor sym_float sym_int "
    "sym_ite sym_max sym_min sym_not sym_sqrt sym_sum tensor tril_indices triu_indices vander zeros "
    "is_grad_enabled is_autocast_enabled set_autocast_enabled autocast_increment_nesting autocast_decrement_nesting "
    "Size _check _check_is_size _constrain_as_size is_tensor"
)
_OPERATORS = (
    "abs add and_ concat contains delitem eq floordiv ge getitem gt iadd iand ifloordiv ilshift imatmul imod imul "
    "index inv invert ior ipow irshift is_ is_not isub itruediv ixor le lshift lt matmul mod mul ne neg not_ or_ pos "
    "pow rshift setitem sub truediv truth xor"
)
_BUILTINS = "abs bool complex divmod float int len max min pow range round slice sum tuple list"
_ATTRIBUTES = frozenset(
    {
        "H",
        "T",
        "data",
        "device",
        "dtype",
        "grad",
        "imag",
        "is_cuda",
        "mH",
        "mT",
        "ndim",
        "real",
        "requires_grad",
        "shape",
    }
)


class Unresolved(Exception):
    """A target that is not here, or that a dump may not call."""


def encode_target(op: str, target: Any) -> str:
    """The text of a node's target.

    Args:
        op: The node's opcode.
        target: Its target.

    Returns:
        ``op:aten.add.Tensor``, ``packet:mylib.foo``, ``higher_order:cond``, ``function:torch:cat``, ``method:view``,
        or the name itself for placeholders, attributes and the output.
    """
    if op in ("placeholder", "get_attr", "output", "call_module"):
        return str(target)
    if op == "call_method":
        return f"method:{target}"
    if isinstance(target, OpOverload):
        return f"op:{target}"
    if isinstance(target, HigherOrderOperator):
        return f"higher_order:{target.name()}"
    if isinstance(target, OpOverloadPacket):
        return f"packet:{target}"
    known = known_function(target)
    if known is not None:
        return f"function:{known}"
    module = getattr(target, "__module__", None) or type(target).__module__
    return f"function:{module}:{getattr(target, '__qualname__', type(target).__qualname__)}"


def needed_import(text: str) -> str | None:
    """What must be imported before this target can be resolved or run; None if torch is enough.

    Args:
        text: From `encode_target`.
    """
    if match := _OP.fullmatch(text) or _PACKET.fullmatch(text):
        name = ".".join(match.groups()[:2])
        namespace = name.partition(".")[0]
        if namespace in _BUILT_IN or text.startswith("higher_order:"):
            return None
        return custom_op_module(name.replace(".", "::", 1)) or f"the module that registers {namespace}::"
    match = _FUNCTION.fullmatch(text)
    if match and f"{match[1]}:{match[2]}" not in _functions():
        return match[1]
    return None


def known_function(function: Any) -> str | None:
    """``module:name`` of a function that a dump may call; None for another."""
    return _names().get(function) if callable(function) and type(function).__hash__ is not None else None


def is_importable(text: str, target: Any) -> bool:
    """Whether a function's text, from `encode_target`, leads to it again in a process that imports its module."""
    match = _FUNCTION.fullmatch(text)
    if match is None:
        return False
    value: Any = sys.modules.get(match[1])
    for step in match[2].split("."):
        value = getattr(value, step, None)
    return value is target


def _is_forbidden(operator_name: str) -> bool:
    return operator_name in _FORBIDDEN_OPS or _UNCHECKED.search(operator_name) is not None


def checked_target(text: str) -> None:
    """Refuse what no dump may call, whether or not it is here.

    Raises:
        Unresolved: The text is no target, or a forbidden one.
    """
    if match := _OP.fullmatch(text):
        if _is_forbidden(f"{match[1]}.{match[2]}"):
            raise Unresolved(f"{text!r}: a dump may not call this operator")
    elif match := _METHOD.fullmatch(text):
        name = match[1]
        plain = not name.startswith("_") or name in ("__getitem__", "__setitem__", "__contains__")
        if name in _FORBIDDEN_METHODS or not plain or not callable(getattr(torch.Tensor, name, None)):
            raise Unresolved(f"{text!r}: a dump may not call this method")
    elif match := _PACKET.fullmatch(text):
        if _is_forbidden(match[1]):
            raise Unresolved(f"{text!r}: a dump may not call this operator")
    elif match := _FUNCTION.fullmatch(text):
        if match[1].partition(".")[0] == "torch" and _is_forbidden(f"aten.{match[2].rpartition('.')[2]}"):
            raise Unresolved(f"{text!r}: a dump may not call this function")
    else:
        raise Unresolved(f"{text!r} names no operator, function or method")


def resolve_target(text: str, imported: Collection[str] = ()) -> Any:
    """What a text of `encode_target` stands for.

    Args:
        text: The text.
        imported: Modules that the *user* named, whose functions may be called too.

    Raises:
        Unresolved: It is not registered here, or a dump may not call it.
    """
    checked_target(text)
    if match := _OP.fullmatch(text):
        packet = find_op_packet(match[1], match[2])
        overload = getattr(packet, match[3], None) if packet is not None else None
        if not isinstance(overload, OpOverload):
            raise Unresolved(f"{text!r} is not registered here{_hint(text)}")
        _refuse_files(text, [overload])
        return overload
    if match := _PACKET.fullmatch(text):
        namespace, _, name = match[1].rpartition(".")
        if any(word in name for word in _PROCESS_BOUND):
            raise Unresolved(f"{text!r} needs a kernel or an object that lived in the process that was traced")
        packet = find_op_packet(namespace or "higher_order", name)
        if packet is None:
            raise Unresolved(f"{text!r} is not registered here{_hint(text)}")
        if isinstance(packet, OpOverloadPacket):
            _refuse_files(text, [getattr(packet, name) for name in packet.overloads()])
        return packet
    if match := _METHOD.fullmatch(text):
        return match[1]
    name = text.removeprefix("function:")
    if name in _functions():
        return _functions()[name]
    module, _, path = name.partition(":")
    if module in imported:
        return _imported(module, path)
    raise Unresolved(f"{text!r} is not among the functions of torch and Python that a dump may call{_hint(text)}")


def _refuse_files(text: str, overloads: Collection[OpOverload]) -> None:
    for overload in overloads:
        for argument in overload._schema.arguments:
            if _TEXT.search(str(argument.real_type)) and _FILE_ARGUMENT.search(argument.name.lower()):
                raise Unresolved(f"{text!r}: a dump may not call an operator that opens a file ({argument.name})")


def attribute_allowed(name: object) -> bool:
    """Whether a graph may read this attribute of a tensor with ``getattr``."""
    return isinstance(name, str) and name in _ATTRIBUTES


def _hint(text: str) -> str:
    needed = needed_import(text)
    return "" if needed is None else f". Import {needed} first, if you trust it"


def _imported(module: str, path: str) -> Any:
    value: Any = sys.modules.get(module)
    for step in path.split("."):
        value = getattr(value, step, None)
    if not callable(value):
        raise Unresolved(f"{module}.{path} is not there, or cannot be called")
    return value


@functools.cache
def _functions() -> Mapping[str, Callable[..., Any]]:
    """All functions that a dump may call, by ``module:name``."""
    table: dict[str, Callable[..., Any]] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # looking at deprecated functions is not using them
        overridable = get_overridable_functions()
    for home in (torch, torch.nn.functional, torch.functional, torch.linalg, torch.fft, torch.special):
        for function in overridable.get(home, ()):
            name = getattr(function, "__name__", "")
            if getattr(home, name, None) is function:
                table[f"{home.__name__}:{name}"] = function
    for name in _FACTORIES.split():
        factory = getattr(torch, name, None)
        if callable(factory):
            table[f"torch:{name}"] = factory
    for name in dir(torch.nn.functional):
        function = getattr(torch.nn.functional, name)
        if not name.startswith("_") and getattr(function, "__module__", None) == "torch.nn.functional":
            table.setdefault(f"torch.nn.functional:{name}", function)
    for function in overridable.get(torch.Tensor, ()):
        name = getattr(function, "__name__", "")
        if (
            not name.startswith("_")
            and name not in _FORBIDDEN_METHODS
            and getattr(torch.Tensor, name, None) is function
        ):
            table[f"torch.Tensor:{name}"] = function
    table |= internal_functions()
    table |= {f"operator:{name}": getattr(operator, name) for name in _OPERATORS.split()}
    table |= {f"builtins:{name}": getattr(builtins, name) for name in (*_BUILTINS.split(), "getattr")}
    table |= {
        f"math:{name}": getattr(math, name) for name in dir(math) if callable(getattr(math, name)) and name[0] != "_"
    }
    return MappingProxyType({name: function for name, function in table.items() if name not in _FORBIDDEN_FUNCTIONS})


@functools.cache
def _names() -> Mapping[Callable[..., Any], str]:
    """The reverse of `_functions`."""
    return MappingProxyType({function: name for name, function in reversed(list(_functions().items()))})
