"""Copies of a program: of its arguments, its module, and of what a function has captured.

Each run of a check gets its own, so that no run sees what another one changed, and nothing of the user's is changed.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import weakref
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from types import CellType, FunctionType, MethodType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from checked_backend._torch.modes import DisableTorchFunctionSubclass
from checked_backend._torch.tensors import (
    is_wrapper_type,
    is_zero_tensor,
    negative_view,
    storage_identity,
    zero_tensor_like,
)
from checked_backend.checking.code_search import CodeSearch, Variable, is_installed, is_library
from checked_backend.checking.tree import argument_leaves, has_attributes, has_tensors, leaves
from checked_backend.errors import CheckedBackendError
from checked_backend.modes.float64 import to_float64
from checked_backend.regions.inputs import base_of, repeats_elements, storage_key

_CHANGEABLE = (list, dict, set, deque, bytearray, np.ndarray, Random, np.random.Generator, np.random.RandomState)


class _Handover(torch.autograd.Function):
    """A tensor with an autograd history: the leaf's values in given memory."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        # made of the storage, because a view that a custom function returns may not be changed in place
        made = torch.empty(0, dtype=memory.dtype, device=memory.device)
        return made.set_(memory.untyped_storage(), memory.storage_offset(), memory.size(), memory.stride())

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


HANDED_OVER = f"{_Handover.__name__}Backward"
"""The name of the autograd node that a copied tensor begins with."""


@dataclass(slots=True)
class Copier:
    """Makes copies that belong together: what shares memory, or is one object, does so among the copies.

    Attributes:
        wide: Make floating-point tensors float64.
        hooks: Copy the hooks of tensors. They run after the program's part of a backward pass.
        variables: The variables of code that hold what a run may read or change, each with a copy of that.
        captured: Copies of what functions hold besides in ``self``, defaults and arguments of a partial, by name.
        leaves: For a copied tensor with an autograd history, by its identity: the leaf whose gradient stands for its.
            Views of one tensor have one.
    """

    wide: bool = False
    hooks: bool = True
    variables: list[tuple[Variable, Any]] = field(default_factory=list)
    captured: dict[str, Any] = field(default_factory=dict)
    leaves: dict[int, torch.Tensor] = field(default_factory=dict)
    _memo: dict[int, Any] = field(default_factory=dict)
    _kept: list[Any] = field(default_factory=list)
    _originals: dict[int, torch.Tensor] = field(default_factory=dict)
    _with_hooks: set[int] = field(default_factory=set)
    _functions: dict[int, FunctionType] = field(default_factory=dict)
    _searched: int = 0
    _not_compared: set[int] = field(default_factory=set)

    def function(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Copy a module, or what a function is called with and on. What its code names: `find_variables`.

        Raises:
            CheckedBackendError: Something that it holds cannot be copied.
        """
        if isinstance(function, functools.partial):
            held = (function.args, function.keywords)
            args, kwargs = self.value(held, "the arguments of functools.partial")
            self._kept += [leaf for _, leaf in leaves(held, "") if isinstance(leaf, torch.nn.Module)]
            self.captured |= dict(leaves(args, "partial.args")) | dict(leaves(kwargs, "partial"))
            return functools.partial(self.function(function.func), *args, **kwargs)
        if isinstance(function, MethodType):
            return MethodType(function.__func__, self._owner(function.__self__))
        if isinstance(function, FunctionType):
            return function
        is_module = isinstance(function, torch.nn.Module)
        called: Callable[..., Any] = self.value(function, "the module") if is_module else self._owner(function)
        return called

    def candidate(self, candidate: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
        """Copy what is held against a function. It shares tensors with the function's copy where these share them.

        What it holds besides is its own: nothing of the program. A module gets the parameters and buffers of the
        function's copy that have the same names.
        """
        captured, known = dict(self.captured), len(self.variables)
        try:
            copied = self.function(candidate)
        except CheckedBackendError:  # a handle of compiled code: it runs as it is
            copied = candidate
        self.find_variables([copied])
        self.captured, self._not_compared = captured, {id(variable) for variable, _ in self.variables[known:]}
        if isinstance(copied, torch.nn.Module) and isinstance(function, torch.nn.Module):
            for path, owner in copied.named_modules():
                for name, tensor in (*function.named_parameters(), *function.named_buffers()):
                    home, _, own = name.rpartition(".")
                    if home == path and hasattr(owner, own):
                        setattr(owner, own, tensor)
        return copied

    def _owner(self, value: Any) -> Any:
        """Copy the object of a method, which may count its calls, whatever it holds."""
        if has_attributes(value) and not isinstance(value, type) and not _is_state(value):
            with contextlib.suppress(CheckedBackendError):  # of a class that makes its objects by itself
                return self._object(value)
        copied = self._held(value, "self")
        if has_tensors(copied):
            self.captured["self"] = copied
        return copied

    def arguments(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[list[Any], dict[str, Any]]:
        """Copy a call's arguments.

        Raises:
            CheckedBackendError: One of them cannot be copied; the message names it.
        """
        named = argument_leaves(function, args, kwargs)
        try:
            self._tensors([leaf for _, leaf in named if isinstance(leaf, torch.Tensor)])
            copied_args, copied_kwargs = self._deep((list(args), dict(kwargs)))
        except Exception:
            for name, leaf in named:
                Copier().value(leaf, f"argument {name!r}")
            raise
        return copied_args, copied_kwargs

    def tensors(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Each copied tensor with its copy."""
        pairs = ((value, self._memo.get(id(value))) for value in self._kept)
        return [(a, b) for a, b in pairs if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)]

    def is_copy(self, value: object) -> bool:
        """Whether an object is one of the copies."""
        return any(value is copied for copied in self._memo.values())

    def value(self, value: Any, what: str) -> Any:
        """Copy anything; ``what`` names it in the `CheckedBackendError` if it cannot be copied."""
        try:
            self._tensors([leaf for _, leaf in leaves(value, "") if isinstance(leaf, torch.Tensor)])
            return self._deep(value)
        except Exception as error:
            raise CheckedBackendError(
                f"check runs the program on copies, and {what} ({type(value).__qualname__}) cannot be copied: "
                f"{type(error).__name__}: {error}. Give its class a __deepcopy__, or make it inside of the function."
            ) from error

    def _deep(self, value: Any) -> Any:
        self._kept.append(value)  # the memo knows objects by their identity
        if isinstance(value, Mapping):  # an optimizer knows its state by parameters
            self._tensors([key for key in value if isinstance(key, torch.Tensor)])
        for _, leaf in leaves(value, ""):
            if isinstance(leaf, torch.Generator) and id(leaf) not in self._memo:
                self._remember(leaf, leaf.clone_state())
            elif self.wide and isinstance(leaf, np.ndarray) and leaf.dtype.kind in "fc" and id(leaf) not in self._memo:
                self._remember(leaf, leaf.astype(np.result_type(leaf.dtype, np.float64)))
        for module in _modules(value):
            self._tensors_of_module(module)
        copied = copy.deepcopy(value, self._memo)
        parameters = [parameter for module in _modules(value) for parameter in module.parameters()]
        for parameter in parameters:
            self._originals[id(parameter)] = parameter
            self._copy_hooks_and_attributes(parameter)
        for module in _modules(copied):
            if self.wide:
                module.double()
            for parameter in module.parameters():
                parameter.grad = None
        return copied

    def give_grads(self) -> dict[int, torch.Tensor]:
        """Give each copy of a leaf a copy of what the leaf has in ``grad``, as that is now.

        Returns:
            These gradients, by the identity of the copies of the leaves.
        """
        given = {}
        for key, tensor in [*self._originals.items()]:
            duplicate, grad = self._memo.get(key), tensor.grad if tensor.is_leaf else None
            if duplicate is None or grad is None:
                continue
            if grad.layout is not torch.strided or repeats_elements(grad):  # which nothing can be written to
                copied = grad.detach().clone()
            elif id(grad) in self._memo:
                copied = self._memo[id(grad)]
                with torch.no_grad():
                    copied.copy_(grad)
            else:
                self._tensors([grad])
                copied = self._memo[id(grad)]
            given[id(duplicate)] = duplicate.grad = (
                copied if copied.dtype is duplicate.dtype else copied.to(duplicate.dtype)
            )
        return given

    def _copy_hooks_and_attributes(self, parameter: torch.Tensor) -> None:
        """Give a parameter's copy what torch's deepcopy of it leaves out: attributes and hooks."""
        duplicate = self._memo.get(id(parameter))
        if duplicate is None or id(duplicate) in self._with_hooks:
            return
        self._with_hooks.add(id(duplicate))
        if not is_wrapper_type(type(parameter)):
            vars(duplicate).update(copy.deepcopy(vars(parameter), self._memo))
        self._hook(parameter, duplicate)

    def _hook(self, tensor: torch.Tensor, duplicate: torch.Tensor) -> None:
        if not self.hooks:
            return
        for hook in (getattr(tensor, "_backward_hooks", None) or {}).values():
            duplicate.register_hook(self._held(hook, "hook"))
        for hook in (getattr(tensor, "_post_accumulate_grad_hooks", None) or {}).values():
            duplicate.register_post_accumulate_grad_hook(self._held(hook, "hook"))

    def _tensors_of_module(self, module: torch.nn.Module) -> None:
        """Tensors that a module keeps and deepcopy refuses, or copies otherwise than views of one another."""
        held: dict[int, torch.Tensor] = {}
        for child in module.modules():
            for _, leaf in leaves({**vars(child), "_modules": None}, ""):
                known = id(leaf) in self._memo or isinstance(leaf, UninitializedParameter)
                if known or not isinstance(leaf, torch.Tensor):
                    continue
                if isinstance(leaf, UninitializedBuffer):  # a lazy module's, which deepcopy refuses as well
                    self._remember(leaf, copy.copy(leaf))
                elif is_zero_tensor(leaf):  # deepcopy looks for its memory
                    self._remember(leaf, zero_tensor_like(leaf))
                elif not leaf.is_leaf:
                    self._remember(leaf, leaf.detach().clone())
                else:
                    held[id(leaf)] = leaf
        keys = {key: storage_key(one) for key, one in held.items()}
        uses = Counter(keys.values())
        del uses[None]
        with_grads = {key for key, one in held.items() if one.requires_grad and type(one) is torch.Tensor}
        self._tensors(
            [one for key, one in held.items() if key in with_grads or uses[keys[key]] > 1 or base_of(one) is not None]
        )

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        # a deep copy of a nested tensor has another ragged size, and autograd then refuses it; of a compressed sparse
        # one there is none
        if tensor.is_nested or tensor.layout not in (torch.strided, torch.sparse_coo):
            return tensor.clone()
        if is_zero_tensor(tensor):
            return zero_tensor_like(tensor)
        if tensor.is_neg():  # a deep copy would share no memory with a copy of its base
            return negative_view(self._copy(negative_view(tensor)))
        if tensor.is_conj():
            return self._copy(tensor.conj()).conj()
        kind = type(tensor)
        if kind in (torch.Tensor, torch.nn.Parameter) or is_wrapper_type(kind) or "__deepcopy__" in vars(kind):
            return copy.deepcopy(tensor, self._memo)
        with DisableTorchFunctionSubclass():
            plain = copy.deepcopy(tensor.as_subclass(torch.Tensor), self._memo)
            return plain.as_subclass(kind)

    def _tensors(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copy tensors that are not copied yet, those that share memory into shared memory."""
        bases_of = {id(tensor): base_of(tensor) for tensor in tensors}
        uses = Counter(key if base is None else id(base) for key, base in bases_of.items())
        # a single view's gradient is its own
        shared = (one for one in bases_of.values() if one is not None and (not one.requires_grad or uses[id(one)] > 1))
        new = list({id(one): one for one in (*shared, *tensors) if id(one) not in self._memo}.values())
        if not new:
            return
        copies = [self._copy(tensor.detach()) for tensor in new]
        if self.wide:
            copies = to_float64(copies)
        for tensor, duplicate in zip(new, copies, strict=True):
            if isinstance(tensor, torch.nn.Parameter):
                duplicate = torch.nn.Parameter(duplicate, requires_grad=tensor.requires_grad)
            elif (base := self._copied_base(tensor, duplicate)) is not None:
                with torch.enable_grad():  # a view that is made without may not be written to with
                    duplicate = base.as_strided(duplicate.shape, duplicate.stride(), duplicate.storage_offset())
                if tensor.requires_grad:
                    self.leaves[id(duplicate)] = self.leaves.get(id(base), base)
            elif tensor.requires_grad and not tensor.is_leaf and type(tensor) is torch.Tensor:
                leaf = duplicate.detach().requires_grad_(True)
                with torch.enable_grad():
                    duplicate = _Handover.apply(leaf, duplicate)  # type: ignore[no-untyped-call]
                self.leaves[id(duplicate)] = leaf
            else:
                with DisableTorchFunctionSubclass():  # which may read attributes
                    duplicate = duplicate.requires_grad_(tensor.requires_grad)
            if type(tensor) is torch.Tensor:
                vars(duplicate).update(vars(tensor))  # what torch._dynamo.mark_dynamic wrote on it
            elif not is_wrapper_type(type(tensor)):
                vars(duplicate).update(copy.deepcopy(vars(tensor), self._memo))
            self._remember(tensor, duplicate)
            self._originals[id(tensor)] = tensor
            if type(tensor) is not torch.nn.Parameter:
                self._hook(tensor, duplicate)

    def _copied_base(self, tensor: torch.Tensor, duplicate: torch.Tensor) -> torch.Tensor | None:
        """The copy of what a tensor is a view of, of which its copy must be a view: they count writes together."""
        own = base_of(tensor)
        base: torch.Tensor | None = None if own is None else self._memo.get(id(own))
        shares = base is not None and storage_identity(base) == storage_identity(duplicate)
        return base if shares else None

    def _remember(self, original: Any, duplicate: Any) -> None:
        self._memo[id(original)] = duplicate
        self._kept.append(original)

    # variables of code

    def _capture_defaults(self, function: FunctionType, values: Any) -> None:
        """Note the tensors among the copied defaults of a function's parameters."""
        code = function.__code__
        if not isinstance(values, dict):
            count = len(values or ())
            values = dict(zip(code.co_varnames[code.co_argcount - count : code.co_argcount], values or (), strict=True))
        for name, value in values.items():
            if has_tensors(value):
                self.captured[_free_name(name, function.__qualname__, value, self.captured)] = value

    def held(self, *, own: bool = False) -> dict[str, Any]:
        """What a program holds now in variables of its code, in ``self``, defaults and arguments of a partial, by name.

        Args:
            own: Look at the program's own instead of at the copies.
        """
        held = dict(self.captured)
        if own:
            known = {id(value): value for value in held.values() if isinstance(value, (int, float, complex, str))}
            known |= {id(self._memo[id(value)]): value for value in self._kept if id(value) in self._memo}
            held = {name: known[id(copied)] for name, copied in held.items() if id(copied) in known}
        for variable, copied in self.variables:
            if id(variable) not in self._not_compared and not isinstance(variable.owner, FunctionType):  # its defaults
                value, owner = variable.get() if own else copied, variable.owner
                name = f"{owner.__name__}.{variable.name}" if isinstance(owner, type) else variable.name
                held[_free_name(name, variable.home, value, held)] = value
        return held

    def find_variables(self, roots: Sequence[Any] = ()) -> None:
        """Find the `variables` of what a program may call: the copied function or module, and arguments.

        The hooks of tensors that were copied since belong to them.

        Raises:
            CheckedBackendError: A variable that the function itself names cannot be copied.
        """
        functions = [root for root in roots if isinstance(root, FunctionType)]
        named = {id(owner) for function in functions for owner in (function, function.__globals__)}
        ours = {id(copied) for copied in self._memo.values()}
        while todo := [*roots, *list(self._functions.values())[self._searched :]]:
            roots, self._searched = (), len(self._functions)
            search = CodeSearch(todo)
            for variable in search.variables.values():
                value = variable.get()
                if id(variable.owner) in ours or id(value) in ours or not _varies(variable, value, search):
                    continue
                try:
                    if not _is_state(value) and _is_changed(value, search):
                        copied = self._object(value)
                    else:
                        copied = self._held(value, variable.name)
                except CheckedBackendError:
                    if isinstance(variable.owner, CellType) or id(variable.owner) in named:
                        raise
                    continue  # perhaps the program never reads it; if it does, its gradient is missed
                if isinstance(variable.owner, FunctionType):
                    self._capture_defaults(variable.owner, copied)
                self.variables.append((variable, copied))

    def _held(self, value: Any, name: str) -> Any:
        """Copy what a function holds; what holds no tensors and cannot be copied stays the very object."""
        if isinstance(value, FunctionType):
            self._functions.setdefault(id(value), value)
        if not _is_state(value):
            return value
        if isinstance(value, MethodType):
            return MethodType(value.__func__, self._held(value.__self__, name))
        if isinstance(value, weakref.ref):
            return weakref.ref(self._held(value(), name))
        try:
            return self._object(value) if has_attributes(value) else self.value(value, f"{name!r}, which is used,")
        except CheckedBackendError:
            if has_tensors(value):
                raise
            return value

    def _object(self, value: Any) -> Any:
        """A copy of an object that shares with it what is no state: a test case also holds its runner's streams."""
        if id(value) in self._memo:
            return self._memo[id(value)]
        try:
            copied = object.__new__(type(value))
        except TypeError:  # a container that has attributes, too
            return self.value(value, "an object of the program")
        self._remember(value, copied)
        for name, inner in vars(value).items():
            vars(copied)[name] = self._held(inner, name)
        return copied


def _free_name(name: str, home: str, value: Any, taken: Mapping[str, Any]) -> str:
    names = (name, f"{home}.{name}", *(f"{home}.{name} {number}" for number in range(2, len(taken) + 3)))
    return next(each for each in names if each not in taken or (taken[each] is value and has_tensors(value)))


def _modules(value: Any) -> list[torch.nn.Module]:
    return [leaf for _, leaf in leaves(value, "") if isinstance(leaf, torch.nn.Module)]


def _is_state(value: Any) -> bool:
    """Whether a run may read or change a value that another run must not share."""
    if type(value) is tuple:  # the defaults of a function
        return any(map(_is_state, value))
    if isinstance(value, (MethodType, weakref.ref)):  # a learning rate scheduler wraps optimizer.step so
        return has_tensors(value.__self__ if isinstance(value, MethodType) else value())
    return isinstance(value, _CHANGEABLE) or has_tensors(value)


def _varies(variable: Variable, value: Any, search: CodeSearch) -> bool:
    """Whether a run may change a variable or what it holds, or has a gradient for it."""
    owner = variable.owner
    home = owner.get("__name__") if isinstance(owner, dict) else getattr(owner, "__module__", None)
    if is_library(home) or is_installed(str(home)):
        return has_tensors(value)
    return variable.name in search.assigned or _is_state(value) or _is_changed(value, search)


def _is_changed(value: Any, search: CodeSearch) -> bool:
    """Whether code may change what an object of the program keeps in attributes."""
    home = type(value).__module__
    plain = isinstance(value, SimpleNamespace) or not (is_library(home) or is_installed(home))
    if not plain or not has_attributes(value) or hasattr(value, "__del__"):  # which a copy's end would call
        return False
    attributes = vars(value).items()
    return any(key in search.assigned or (key in search.names and _is_state(inner)) for key, inner in attributes)


def refill(held: Sequence[tuple[str, object]], fresh: Sequence[tuple[str, object]]) -> bool:
    """Put the values of some tensors into others, with whatever their memory holds beside them.

    Returns:
        Whether it was done. Nothing is changed if a leaf is no plain tensor, or is not what it was when it was given:
        a call has changed its shape or its place, or has given it an autograd history.
    """
    if [name for name, _ in held] != [name for name, _ in fresh]:
        return False
    pairs: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
    for (_, old), (_, new) in zip(held, fresh, strict=True):
        if type(old) is not torch.Tensor or type(new) is not torch.Tensor or _layout(old) != _layout(new):
            return False
        storages = old.untyped_storage(), new.untyped_storage()
        if storages[0].nbytes() != storages[1].nbytes():
            return False
        pairs[storages[0].data_ptr()] = storages
    for old_storage, new_storage in pairs.values():
        old_storage.copy_(new_storage)
    written = [old for _, old in held if isinstance(old, torch.Tensor) and not old.is_inference()]
    torch.autograd.graph.increment_version(written)  # as any write of the program's own does
    return True


def _layout(tensor: torch.Tensor) -> tuple[object, ...]:
    if tensor.layout is not torch.strided:
        return (tensor.layout, id(tensor))
    place = (tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.is_conj(), tensor.is_neg())
    return (*place, tensor.dtype, tensor.device, tensor.requires_grad, tensor.is_leaf)
