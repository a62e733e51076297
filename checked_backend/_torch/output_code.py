"""The code that Inductor generates, and which nodes of its graph each kernel computes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

__all__ = ["CALL_MARK", "OutputCode", "output_code_noted"]

CALL_MARK = "[Provenance debug handles]"
"""The beginning of a comment that names the call on the lines after it."""


@dataclass(frozen=True, slots=True)
class OutputCode:
    """The code of one graph.

    Attributes:
        kind: Which graph of the region it is: ``forward``, ``backward`` or ``inference``.
        text: The Python module, which has the sources of the kernels as strings.
        computed: The nodes that a call of a kernel computes. The call is its kernel's name, a colon and a number, which
            the text has in a comment in front of the call.
        origins: The nodes of Dynamo's graph that nodes were made from, where that is known.
    """

    kind: str
    text: str
    computed: Mapping[str, tuple[str, ...]]
    origins: Mapping[str, str]


@contextmanager
def output_code_noted(found: list[OutputCode]) -> Iterator[None]:
    """Note the code of each graph that Inductor compiles in this block, in this process. Nothing is read from disk.

    A backward graph is compiled together with its forward graph, not at its first call. The text of the code has a few
    more comments than usual.

    Args:
        found: Gets the code of each graph, in the order in which they are compiled.
    """
    from torch._functorch import config as functorch_config  # noqa: PLC0415  slow to import
    from torch._inductor import config, debug  # noqa: PLC0415  Inductor is slow to import
    from torch._inductor.graph import GraphLowering  # noqa: PLC0415
    from torch._inductor.virtualized import V  # noqa: PLC0415

    lowering: Any = GraphLowering
    before = lowering.save_output_code

    def note(text: str) -> None:
        if before is not None:
            before(text)
        graph: Any = V.graph
        kind = "backward" if graph.is_backward else "inference" if graph.is_inference else "forward"
        # torch forgets these only when the whole region is compiled: those of an earlier graph are not in the text
        known: Mapping[str, Sequence[str]] = debug._inductor_triton_kernel_to_post_grad_node_info
        computed = {call: tuple(names) for call, names in known.items() if f"{CALL_MARK} {call}\n" in text}
        nodes = {node.name: node.meta.get("source_fn_stack") for node in graph.graph.nodes}
        origins = {name: str(stack[-1][0]) for name, stack in nodes.items() if stack}
        found.append(OutputCode(kind, text, computed, origins))

    changes = {"trace.provenance_tracking_level": 2}  # the least that says which nodes a kernel computes
    lowering.save_output_code = note
    try:
        with config.patch(changes), functorch_config.patch(force_non_lazy_backward_lowering=True):
            yield
    finally:
        lowering.save_output_code = before
