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

from checked_backend._torch.patches import replaced

_ENTRY = re.compile(r'extern "C"\s+void\s+kernel\(')
_DIRECTIVE = re.compile(r"^\s*#\s*(?!include\b|pragma\b)", re.MULTILINE)
_INCLUDE = re.compile(r"^\s*#\s*include\b.*$", re.MULTILINE)
_BATCH = "checked_backend_batch"
_LEAST = 4
"""The least number of kernels that are a part: the headers take as long as a few kernels."""


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

    thread, alone = threading.get_ident(), AsyncCompile.cpp_pybinding

    def collecting(below: Callable[..., Any]) -> Callable[..., Any]:
        def collect(compiling: Any, types: list[str], source: str) -> Any:
            kernel = _Kernel(types, source)
            if threading.get_ident() != thread or not kernel.joins:
                return below(compiling, types, source)
            vars(compiling).setdefault(_BATCH, []).append(kernel)
            return kernel

        return collect

    def waiting(wait: Callable[..., None]) -> Callable[..., None]:
        def wait_for_all(compiling: Any, scope: dict[str, Any]) -> None:
            batch = vars(compiling).pop(_BATCH, [])
            made: list[Any] = []
            if len(batch) > 1:
                with suppress(Exception):  # whatever the compiler does not take is told when it gets it alone
                    made = _compiled(compiling, batch)
            made = made or [alone(compiling, kernel.types, kernel.source) for kernel in batch]
            known = {id(kernel): function for kernel, function in zip(batch, made, strict=True)}
            scope.update({name: known[id(value)] for name, value in scope.items() if id(value) in known})
            wait(compiling, scope)

        return wait_for_all

    with replaced(AsyncCompile, "cpp_pybinding", collecting), replaced(AsyncCompile, "wait", waiting):
        yield


def _compiled(compiling: Any, batch: Sequence[_Kernel]) -> list[Callable[..., None]]:
    """The functions of kernels, compiled in as many parts as there are threads to compile."""
    from torch._inductor.async_compile import get_compile_threads  # noqa: PLC0415  Inductor is slow to import
    from torch._inductor.codecache import CppPythonBindingsCodeCache  # noqa: PLC0415

    threads, most = get_compile_threads(), max(len(kernel.types) for kernel in batch)
    size = max(-(-len(batch) // threads), _LEAST)
    types, submit = ["int64_t", *["uintptr_t"] * most], compiling.submit if threads > 1 else None
    parts = [batch[start : start + size] for start in range(0, len(batch), size)]
    results = [
        CppPythonBindingsCodeCache.load_pybinding_async(types, _joined(part, most), submit_fn=submit) for part in parts
    ]
    return [
        partial(_call, function, number, most)
        for function, part in zip([result() for result in results], parts, strict=True)
        for number in range(len(part))
    ]


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
    given = [value.data_ptr() if isinstance(value, torch.Tensor) else value for value in args]
    function(number, *given, *[0] * (most - len(given)))
