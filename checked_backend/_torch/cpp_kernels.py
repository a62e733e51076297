"""Compile the C++ kernels of a module that Inductor generated together, in one translation unit.

Most of what a C++ compiler does for a kernel it does for the headers, and they are the same for each.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

_ENTRY = re.compile(r'extern "C"\s+void\s+kernel\(')
_DIRECTIVE = re.compile(r"^\s*#\s*(?!include\b|pragma\b)", re.MULTILINE)
_INCLUDE = re.compile(r"^\s*#\s*include\b.*$", re.MULTILINE)
_BATCH = "checked_backend_batch"


@dataclass(frozen=True, slots=True, eq=False)
class _Kernel:
    """A kernel that is not compiled yet.

    Attributes:
        types: The C++ types of its arguments.
    """

    types: Sequence[str]
    source: str

    @property
    def joins(self) -> bool:
        """Whether it can be compiled together with others: it defines no macro, and takes pointers and sizes."""
        plain = all(kind.endswith("*") or kind.removeprefix("const ") == "int64_t" for kind in self.types)
        return plain and len(_ENTRY.findall(self.source)) == 1 and not _DIRECTIVE.search(self.source)


@contextmanager
def cpp_kernels_together() -> Iterator[None]:
    """Compile the kernels of each module that this thread generates or loads in this block together.

    Kernels that cannot be, or that the compiler refuses together, are compiled one by one. They compute the same.
    """
    from torch._inductor.async_compile import AsyncCompile  # noqa: PLC0415  Inductor is slow to import

    compiler: Any = AsyncCompile
    one_by_one, wait, thread = compiler.cpp_pybinding, compiler.wait, threading.get_ident()

    def collect(compiling: Any, types: list[str], source: str) -> Any:
        kernel = _Kernel(types, source)
        if threading.get_ident() != thread or not kernel.joins:
            return one_by_one(compiling, types, source)
        vars(compiling).setdefault(_BATCH, []).append(kernel)
        return kernel

    def wait_for_all(compiling: Any, scope: dict[str, Any]) -> None:
        batch = vars(compiling).pop(_BATCH, [])
        made: list[Any] = []
        if len(batch) > 1:
            with suppress(Exception):  # whatever the compiler does not take is told when it gets it alone
                made = _compiled(batch)
        made = made or [one_by_one(compiling, kernel.types, kernel.source) for kernel in batch]
        known = {id(kernel): function for kernel, function in zip(batch, made, strict=True)}
        scope.update({name: known[id(value)] for name, value in scope.items() if id(value) in known})
        wait(compiling, scope)

    compiler.cpp_pybinding, compiler.wait = collect, wait_for_all
    try:
        yield
    finally:
        compiler.cpp_pybinding, compiler.wait = one_by_one, wait


def _compiled(batch: Sequence[_Kernel]) -> list[Callable[..., None]]:
    from torch._inductor.codecache import CppPythonBindingsCodeCache  # noqa: PLC0415  Inductor is slow to import

    most = max(len(kernel.types) for kernel in batch)
    function = CppPythonBindingsCodeCache.load_pybinding(["int64_t", *["uintptr_t"] * most], _joined(batch, most))
    return [partial(_call, function, number, most) for number in range(len(batch))]


def _joined(batch: Sequence[_Kernel], most: int) -> str:
    """One source: each kernel in a namespace of its own, and a function that calls the one of a number."""
    includes = dict.fromkeys(line for kernel in batch for line in _INCLUDE.findall(kernel.source))
    bodies, cases = [], []
    for number, kernel in enumerate(batch):
        body = _ENTRY.sub("static void kernel(", _INCLUDE.sub("", kernel.source))
        bodies.append(f"namespace kernel_{number} {{\n{body}\n}}")
        given = ", ".join(
            f"{'reinterpret' if kind.endswith('*') else 'static'}_cast<{kind}>(a{place})"
            for place, kind in enumerate(kernel.types)
        )
        cases.append(f"case {number}: kernel_{number}::kernel({given}); break;")
    parameters = "".join(f", uintptr_t a{place}" for place in range(most))
    entry = (
        f'extern "C" void kernel(int64_t number{parameters}) {{\nswitch (number) {{\n' + "\n".join(cases) + "\n}\n}\n"
    )
    return "\n".join([*includes, *bodies, entry])


def _call(function: Callable[..., None], number: int, most: int, *args: Any) -> None:
    given = [value.data_ptr() if isinstance(value, torch.Tensor) else int(value) for value in args]
    function(number, *given, *[0] * (most - len(given)))
