"""After a failure: how small? Reduce a program that goes wrong, write a script that shows it, find a workaround."""

from checked_backend.diagnose.reduce.problem import ReductionProgress
from checked_backend.diagnose.reduce.sequence import Reduction, reduce
from checked_backend.diagnose.repro.repro import Repro, write_repro
from checked_backend.diagnose.repro.source_script import write_source_repro
from checked_backend.diagnose.repro.translate import Untranslatable
from checked_backend.diagnose.workaround.apart import without_line
from checked_backend.diagnose.workaround.cost import Cost, measure_cost
from checked_backend.diagnose.workaround.settings import COSTLY, EAGER, SETTINGS, Setting, taken_back
from checked_backend.diagnose.workaround.workaround import Workaround, find_workaround, helps, keep_line_out, keep_out

__all__ = [
    "COSTLY",
    "EAGER",
    "SETTINGS",
    "Cost",
    "Reduction",
    "ReductionProgress",
    "Repro",
    "Setting",
    "Untranslatable",
    "Workaround",
    "find_workaround",
    "helps",
    "keep_line_out",
    "keep_out",
    "measure_cost",
    "reduce",
    "taken_back",
    "without_line",
    "write_repro",
    "write_source_repro",
]
