"""`check`: one call that runs a program in eager and compiled, and judges everything it leaves behind."""

from __future__ import annotations

from checked_backend.checking.check import check

__all__ = ["check"]
