"""The environment of a report."""

from __future__ import annotations

import platform

import pytest
import torch

from checked_backend.report.environment import environment


def test_environment() -> None:
    facts = environment()
    assert facts["python"] == platform.python_version()
    assert facts["torch"] == str(torch.__version__)
    assert {"platform", "cpu", "threads", "compiler"} <= set(facts)
    assert all(isinstance(value, str) and value and "\n" not in value for value in facts.values())


@pytest.mark.process
def test_missing_compiler_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert environment()["compiler"] == "no-such-compiler: not found"
