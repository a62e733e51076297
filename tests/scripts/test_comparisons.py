"""The code that is copied into scripts."""

from __future__ import annotations

from typing import Any

import torch

from checked_backend.scripts.comparisons import calls_differ, fake_kernel_differs, source_of, values_differ


def test_what_is_copied_has_no_annotations_and_does_the_same() -> None:
    lines = source_of(values_differ)
    assert lines[2] == "def values_differ(program, compiled, make_inputs, tolerance, index=None):"
    names: dict[str, Any] = {"torch": torch}
    exec("\n".join(lines), names)
    given = (torch.sin, lambda x: torch.sin(x) + 1, lambda: [torch.ones(2)])
    assert names["values_differ"](*given, tolerance=0.5) is values_differ(*given, tolerance=0.5) is True
    assert names["values_differ"](*given, tolerance=2.0) is values_differ(*given, tolerance=2.0) is False


def test_all_that_a_copied_function_uses_is_copied_too_and_nothing_else() -> None:
    assert [line.split("(")[0] for line in source_of(calls_differ) if line.startswith(("def ", "class "))] == [
        *("class RoundedOtherwise", "def outcome", "def outcomes"),
        *("def is_rounding", "def shared_memory", "def calls_differ"),  # its own tensors are no function
    ]
    assert "def memory_of(value):" in source_of(fake_kernel_differs)
