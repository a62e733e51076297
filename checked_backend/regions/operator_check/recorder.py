"""Record what the kernels of a generated module write, in one call, with the kernels as they are."""

from __future__ import annotations

import ast
import copy
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import CodeType, FunctionType
from typing import Any

import torch

from checked_backend._torch.generated_modules import GeneratedModule, arguments_of, buffers_in, calls_kernel
from checked_backend._torch.tensors import clone_preserve_strides
from checked_backend.numerics.bits import same_bits

_NAME = "checked_backend_recording"
_CODE = f"{_NAME}_code"
_NO_ROOM = -1.0


Key = str | int
"""A tensor of a module's function: the name of a buffer, the place of an argument, or -1 less the place of a result."""


class Recording:
    """What one call of a module's function read and wrote.

    Args:
        room: The most bytes that are kept.
        keys: What to keep of buffers, results, and arguments whose memory is written to; None for all.

    Attributes:
        arguments: The tensors and sizes that the module was called with, None for each that is not kept; None if it was
            not called.
        values: By the name of a buffer: what it held, after each write.
        lines: By the name of a buffer: the lines of the module's text that wrote to it.
        results: The results of the call; none if not all is kept.
        returned: By place: those that are kept then.
        kept: The bytes that are kept.
        sizes: The bytes of each tensor that would be kept.
        left_out: Those for which there was no room.
    """

    def __init__(self, room: float, keys: Collection[Key] | None = None) -> None:
        self._calls = 0
        self.arguments: Sequence[Any] | None = None
        self.values: dict[str, list[torch.Tensor]] = {}
        self.lines: dict[str, list[int]] = {}
        self.results: Sequence[Any] = ()
        self.returned: dict[int, torch.Tensor] = {}
        self.kept = 0
        self.sizes: dict[Key, int] = {}
        self.left_out: set[Key] = set()
        self._room = room
        self._keys = keys
        self._depth = 0
        self._latest: dict[int, torch.Tensor] = {}  # what was kept of a buffer last, by where its memory begins

    @property
    def is_mixed(self) -> bool:
        """Whether more calls than one were recorded: another thread runs the region at the same time."""
        return self._calls > 1

    @property
    def is_complete(self) -> bool:
        """Whether everything was kept."""
        return self._keys is None and not self.left_out

    def begin(self, arguments: Sequence[Any], written: Collection[int]) -> None:
        """A function of the module is called: the first is the module's own, others are parts of it.

        Args:
            arguments: Its arguments.
            written: Places of those whose memory is written to.
        """
        if self._depth == 0:
            self._calls += 1
            self.arguments = [
                value if place not in written else self._kept(value) if self._has_room(place, value) else None
                for place, value in enumerate(arguments)
            ]
        self._depth += 1

    def wrote(self, line: int, buffers: Mapping[str, Any]) -> None:
        """A line called a kernel with these buffers: keep those that it wrote to."""
        for name, value in buffers.items():
            if not isinstance(value, torch.Tensor):
                continue
            versions = self.values.get(name, [])
            if not versions or not is_unchanged(versions[-1], value):
                if not self._has_room(name, value):
                    self.kept -= sum(map(_bytes, self.values.pop(name, ())))
                    continue
                self.values[name] = versions = [*versions, self._kept(value)]
                self.lines.setdefault(name, []).append(line)
            if self.is_complete:
                self._latest[value.data_ptr()] = versions[-1]

    def end(self, results: Any) -> Any:
        """A function of the module returns."""
        self._depth -= 1
        if self._depth == 0:
            kept = [self._kept_before(place, value) for place, value in enumerate(results)]
            if self.is_complete:
                self.results = kept
            else:
                self.returned = {place: one for place, one in enumerate(kept) if isinstance(one, torch.Tensor)}
        return results

    def _kept_before(self, place: int, value: Any) -> Any:
        """What was kept of a result when it was written, or a copy: a backward pass may use its memory."""
        known = self._latest.get(value.data_ptr()) if isinstance(value, torch.Tensor) else None
        if known is not None and known.stride() == value.stride() and is_unchanged(known, value):
            return known
        return self._kept(value) if self._has_room(~place, value) else None

    def _has_room(self, key: Key, value: Any) -> bool:
        """Whether a tensor is kept. From the first on for which there is no room, none is."""
        if not isinstance(value, torch.Tensor):
            return True
        if self._keys is not None and key not in self._keys:
            return False
        if self.left_out or self.kept + _bytes(value) > self._room:
            if key not in self.left_out:
                self.sizes[key] = self.sizes.get(key, 0) + _bytes(value)
            self.left_out.add(key)
            self._latest.clear()
            return False
        self.sizes[key] = self.sizes.get(key, 0) + _bytes(value)
        return True

    def _kept(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        self.kept += _bytes(value)
        return clone_preserve_strides(value.detach())


def _bytes(value: torch.Tensor) -> int:
    return value.numel() * value.element_size()


@contextmanager
def recorded(
    modules: Iterable[GeneratedModule], room: float, keys: Mapping[int, Collection[Key]] | None = None
) -> Iterator[list[tuple[GeneratedModule, Recording]]]:
    """Record one call of each module in this block. The code that calls kernels is exchanged, no kernel is.

    Another thread that calls a module waits for none of this, but only one thread at a time may record it.

    Args:
        room: The most bytes that are kept of each module.
        keys: What is kept, by the identity of a module; None for everything.
    """
    recordings = [(module, Recording(room, None if keys is None else keys.get(id(module), ()))) for module in modules]
    functions = [(function, *rest) for (module, *rest) in recordings for function, _ in module.functions]
    with ExitStack() as stack:
        for function, *_ in sorted(functions, key=lambda entry: id(entry[0])):
            stack.enter_context(vars(function).setdefault(_NAME, threading.RLock()))
        for module, recording in recordings:
            for function, definition in module.functions:
                stack.callback(setattr, function, "__code__", function.__code__)
                function.__globals__[_NAME] = recording
                # another thread may be in the middle of the code that records
                stack.callback(function.__globals__.__setitem__, _NAME, Recording(_NO_ROOM))
                function.__code__ = _instrumented(function, definition, module.written)
        yield recordings


def _instrumented(function: FunctionType, definition: ast.FunctionDef, written: Collection[str]) -> CodeType:
    """The code of a function that records what it does. It is made once, and kept at the function."""
    if _CODE not in vars(function):
        changed = _Instrument().visit(copy.deepcopy(definition))
        arguments = [argument.arg for argument in definition.args.args if argument.arg != "self"]
        places = _places_written(definition, written)
        changed.body.insert(0, ast.parse(f"{_NAME}.begin({arguments[0]}, {places!r})").body[0])
        module = ast.fix_missing_locations(ast.Module([changed], []))
        constants = compile(module, function.__code__.co_filename, "exec").co_consts
        [vars(function)[_CODE]] = [one for one in constants if isinstance(one, CodeType)]
    code: CodeType = vars(function)[_CODE]
    return code


def _places_written(definition: ast.FunctionDef, written: Collection[str]) -> set[int]:
    """The places of the arguments that are written to, or whose memory is used for a buffer."""
    names, taken = arguments_of(definition), set(written)
    sources = (*names, "reinterpret_tensor")
    for node in ast.walk(definition):
        if not isinstance(node, ast.Assign) or not ast.unparse(node.targets[0]).startswith("buf"):
            continue
        if ast.unparse(node.value).startswith(sources):
            taken |= {one.id for one in ast.walk(node.value) if isinstance(one, ast.Name)}
    return {place for place, name in enumerate(names) if name in taken}


class _Instrument(ast.NodeTransformer):
    """Add a call behind each statement that may call a kernel."""

    def visit_Expr(self, node: ast.Expr) -> list[ast.stmt]:
        return self._seen(node)

    def visit_Assign(self, node: ast.Assign) -> list[ast.stmt]:
        return self._seen(node)

    def visit_Return(self, node: ast.Return) -> ast.stmt:
        return ast.parse(f"return {_NAME}.end({ast.unparse(node.value or ast.Constant(None))})").body[0]

    def _seen(self, node: ast.Expr | ast.Assign) -> list[ast.stmt]:
        if not calls_kernel(node) and not isinstance(node.value, ast.Subscript):
            return [node]
        names = sorted(buffers_in(node))
        written = ", ".join(f"{name!r}: {name}" for name in names)
        return [node, *ast.parse(f"{_NAME}.wrote({node.lineno}, {{{written}}})").body] if names else [node]


def is_unchanged(kept: torch.Tensor, now: torch.Tensor) -> bool:
    """Whether a tensor has the shape, the dtype and the bits of one that was kept."""
    return kept.shape == now.shape and kept.dtype == now.dtype and same_bits(kept, now)
