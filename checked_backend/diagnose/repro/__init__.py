"""Scripts that show a failure in a fresh process."""

from checked_backend.diagnose.repro.repro import Repro, write_kernel_repro, write_repro, write_source_repro
from checked_backend.scripts.values import Untranslatable

__all__ = ["Repro", "Untranslatable", "write_kernel_repro", "write_repro", "write_source_repro"]
