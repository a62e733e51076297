"""`check`: one call that runs a program in eager and compiled, and compares all its results and effects."""

from __future__ import annotations

from checked_backend.checking.check import check
from checked_backend.checking.package import check_package

__all__ = ["check", "check_package"]
