"""Passes: each proposes smaller programs; only `Problem.consider` accepts one."""

from checked_backend.reduce.passes.graph import (
    bypass_calls,
    drop_outputs,
    earlier_output,
    merge_inputs,
    near_output,
    recorded_calls,
)

__all__ = ["bypass_calls", "drop_outputs", "earlier_output", "merge_inputs", "near_output", "recorded_calls"]
