"""Code for programs that tests run in processes of their own."""

from __future__ import annotations

COMPILER_WITH_COSINE_FOR_SINE = """\
def wrong(gm, example_inputs):
    for node in gm.graph.nodes:
        if node.target in (torch.sin, "sin"):
            node.target = torch.cos if node.op == "call_function" else "cos"
    gm.recompile()
    return gm.forward
"""
"""Defines ``wrong``, a compiler that computes a cosine for each sine. It needs ``import torch`` before it."""
