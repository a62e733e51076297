"""Passes: each proposes smaller programs; only `Problem.consider` accepts one."""

from checked_backend.diagnose.reduce.passes.calls import common_dtypes, drop_optional_tensors, round_arguments
from checked_backend.diagnose.reduce.passes.graph import (
    bypass_calls,
    drop_outputs,
    each_alone,
    earlier_output,
    merge_inputs,
    near_output,
    recorded_calls,
)
from checked_backend.diagnose.reduce.passes.shapes import drop_dimensions, make_static, shrink_sizes
from checked_backend.diagnose.reduce.passes.values import simplify_values

__all__ = [
    "bypass_calls",
    "common_dtypes",
    "drop_dimensions",
    "drop_optional_tensors",
    "drop_outputs",
    "each_alone",
    "earlier_output",
    "make_static",
    "merge_inputs",
    "near_output",
    "recorded_calls",
    "round_arguments",
    "shrink_sizes",
    "simplify_values",
]
