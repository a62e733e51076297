"""Modules of torch that a compilation imports when it first needs them."""

from __future__ import annotations

LATE_MODULES = (
    "torch._inductor.pattern_matcher",  # over a second; AOT autograd's compilers need it too
    "torch._inductor.debug",
    "torch.distributed.tensor.experimental._func_map",
)
"""The slow ones. Importing them starts no thread. A version of torch may lack some."""
