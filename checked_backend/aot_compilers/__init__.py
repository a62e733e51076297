"""The AOT-level compilers of this package, as ``checked_backend.aot_compilers``.

They serve as ``fw_compiler``, ``bw_compiler`` and ``inference_compiler`` of ``torch._dynamo``'s ``aot_autograd`` and of
``functorch.compile``'s ``aot_function`` and ``aot_module``.
"""

from __future__ import annotations

from checked_backend.aot_compilers.checked import checked
from checked_backend.aot_compilers.inductor import inductor
from checked_backend.aot_compilers.plain import draw_graph, dump_graph, interpret, nop, print_graph, torchscript

__all__ = ["checked", "draw_graph", "dump_graph", "inductor", "interpret", "nop", "print_graph", "torchscript"]
