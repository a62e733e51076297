"""The code that is copied into scripts."""

from __future__ import annotations

import ast
from typing import Any

import torch

from checked_backend.scripts import comparisons
from checked_backend.scripts.comparisons import FAKE_KERNEL, source_of, values_differ


def test_what_is_copied_has_no_annotations_and_does_the_same() -> None:
    lines = source_of(values_differ)
    assert lines[2] == "def values_differ(program, compiled, make_inputs, tolerance, index=None):"
    names: dict[str, Any] = {"torch": torch}
    exec("\n".join(lines), names)
    given = (torch.sin, lambda x: torch.sin(x) + 1, lambda: [torch.ones(2)])
    assert names["values_differ"](*given, tolerance=0.5) is values_differ(*given, tolerance=0.5) is True
    assert names["values_differ"](*given, tolerance=2.0) is values_differ(*given, tolerance=2.0) is False


def test_all_that_a_copied_function_calls_is_copied_too() -> None:
    own = {
        name for name, value in vars(comparisons).items() if getattr(value, "__module__", "") == comparisons.__name__
    }
    groups = [value for value in vars(comparisons).values() if isinstance(value, tuple)]
    assert FAKE_KERNEL in groups
    for group in groups:
        tree = ast.parse("\n".join(source_of(*group)))
        names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
        local = {node.id for node in names if isinstance(node.ctx, ast.Store)}
        assert {node.id for node in names} & own - local <= {function.__name__ for function in group}
