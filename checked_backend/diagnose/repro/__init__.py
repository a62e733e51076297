"""Scripts that show a failure in a fresh process."""

from checked_backend.diagnose.repro.repro import Repro, write_repro
from checked_backend.diagnose.repro.source_script import write_source_repro
from checked_backend.diagnose.repro.translate import Untranslatable

__all__ = ["Repro", "Untranslatable", "write_repro", "write_source_repro"]
