"""Inductor as a compiler of single AOT graphs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from checked_backend._torch.inductor import inductor_compile_graph
from checked_backend.aot.boxed import BoxedCallable
from checked_backend.aot_compilers.graph_kind import graph_kind, user_outputs


def inductor(gm: fx.GraphModule, example_inputs: Sequence[Any], **patches: Any) -> BoxedCallable:
    """Compile one AOT graph with Inductor.

    Inductor expects graphs that were traced with its own decompositions: give AOT autograd
    ``torch._inductor.decomposition.select_decomp_table()``. ``torch.compile(backend="inductor")`` does more than this:
    passes over the Dynamo graph and the joint graph, CUDA graphs.

    Args:
        gm: An ATen graph from AOT autograd. Inductor changes it.
    """
    kind = graph_kind(gm)
    visible = [] if kind == "backward" else user_outputs(gm)
    return inductor_compile_graph(gm, example_inputs, kind=kind, user_outputs=visible, patches=patches)
