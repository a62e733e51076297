"""After a failure: how small? Reduce a program that goes wrong."""

from checked_backend.diagnose.reduce.sequence import reduce

__all__ = ["reduce"]
