"""Compilers at AOT level, for use with ``aot_autograd``, ``functorch.compile.aot_function`` and ``aot_module``."""

from __future__ import annotations

from checked_backend.aot.compilers import draw_graph, interpret, nop, print_graph, torchscript

__all__ = ["draw_graph", "interpret", "nop", "print_graph", "torchscript"]
