"""Record what the kernels of a generated module write, in one call, with the kernels as they are."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from checked_backend._torch.generated_modules import GeneratedModule
from checked_backend._torch.tensors import clone_preserve_strides

__all__ = ["Recording", "recorded"]

_NAME = "checked_backend_recording"
_BUFFER = re.compile(r"buf\d+")
_NO_KERNEL = re.compile(r"empty_strided|reinterpret_tensor|assert_|args\.clear|get_raw_stream|device\(")
"""The beginnings of calls that write no element."""


class Recording:
    """What one call of a module's function read and wrote.

    Args:
        room: The most bytes that are kept.

    Attributes:
        arguments: The tensors and sizes that the module was called with; None if it was not called.
        values: By the name of a buffer: what it held, after each write.
        results: The results of the call.
        kept: The bytes that are kept.
    """

    def __init__(self, room: float) -> None:
        self.arguments: Sequence[Any] | None = None
        self.values: dict[str, list[torch.Tensor]] = {}
        self.results: Sequence[Any] = ()
        self.kept = 0
        self._room = room
        self._depth = 0

    @property
    def is_complete(self) -> bool:
        """Whether there was room for everything."""
        return self.kept <= self._room

    def begin(self, arguments: Sequence[Any]) -> None:
        """A function of the module is called: the first is the module's own, others are parts of it."""
        if self._depth == 0:
            self.arguments = [self._kept(value) for value in arguments]  # some are written to, or their memory is used
        self._depth += 1

    def wrote(self, buffers: Mapping[str, Any]) -> None:
        """A kernel was called with these buffers: keep those that it wrote to."""
        for name, value in buffers.items():
            if not isinstance(value, torch.Tensor) or not self.is_complete:
                continue
            versions = self.values.setdefault(name, [])
            if not versions or not _same_bits(versions[-1], value):
                versions.append(self._kept(value))

    def end(self, results: Any) -> Any:
        """A function of the module returns."""
        self._depth -= 1
        if self._depth == 0:
            self.results = [self._kept(value) for value in results]  # a backward pass may use their memory
        return results

    def _kept(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not self.is_complete:
            return value
        self.kept += value.numel() * value.element_size()
        return clone_preserve_strides(value.detach())


@contextmanager
def recorded(modules: Iterable[GeneratedModule], room: float) -> Iterator[list[tuple[GeneratedModule, Recording]]]:
    """Record each call of some modules in this block. One function's code is exchanged, no kernel is."""
    recordings = [(module, Recording(room)) for module in modules]
    with ExitStack() as stack:
        for module, recording in recordings:
            for function, definition in module.functions:
                stack.callback(_restore, function, function.__code__)
                function.__globals__[f"{_NAME}_{id(recording)}"] = recording
                stack.callback(function.__globals__.pop, f"{_NAME}_{id(recording)}", None)
                function.__code__ = _instrumented(definition, f"{_NAME}_{id(recording)}", function.__code__.co_filename)
        yield recordings


def _restore(function: Any, code: Any) -> None:
    function.__code__ = code


def _instrumented(definition: ast.FunctionDef, name: str, filename: str) -> Any:
    changed = _Instrument(name).visit(ast.parse(ast.unparse(definition)).body[0])
    arguments = [argument.arg for argument in definition.args.args if argument.arg != "self"]
    changed.body.insert(0, ast.parse(f"{name}.begin({arguments[0]})").body[0])
    module = ast.fix_missing_locations(ast.Module([changed], []))
    [code] = [one for one in compile(module, filename, "exec").co_consts if hasattr(one, "co_code")]
    return code


class _Instrument(ast.NodeTransformer):
    """Add a call behind each statement that may call a kernel."""

    def __init__(self, name: str) -> None:
        self._name = name

    def visit_Expr(self, node: ast.Expr) -> list[ast.stmt]:
        return self._seen(node)

    def visit_Assign(self, node: ast.Assign) -> list[ast.stmt]:
        return self._seen(node)

    def visit_Return(self, node: ast.Return) -> ast.stmt:
        return ast.parse(f"return {self._name}.end({ast.unparse(node.value or ast.Constant(None))})").body[0]

    def _seen(self, node: ast.Expr | ast.Assign) -> list[ast.stmt]:
        text = ast.unparse(node.value)
        is_kernel = isinstance(node.value, ast.Call) and not _NO_KERNEL.match(text)
        if not is_kernel and not isinstance(node.value, ast.Subscript):
            return [node]
        names = {one.id for one in ast.walk(node) if isinstance(one, ast.Name) and _BUFFER.fullmatch(one.id)}
        written = ", ".join(f"{name!r}: {name}" for name in sorted(names))
        return [node, *ast.parse(f"{self._name}.wrote({{{written}}})").body] if names else [node]


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(one, other) or torch.equal(one.view(torch.uint8), other.view(torch.uint8))
