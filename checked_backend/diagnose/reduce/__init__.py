"""After a failure: how small? Reduce a program that goes wrong."""

from checked_backend.diagnose.reduce.sequence import Reduction, reduce

__all__ = ["Reduction", "reduce"]
