"""Settings and changes that make a failure vanish."""

from checked_backend.diagnose.workaround.apart import without_line
from checked_backend.diagnose.workaround.settings import COSTLY, EAGER, SETTINGS, Setting, taken_back
from checked_backend.diagnose.workaround.workaround import Workaround, find_workaround, helps, keep_line_out, keep_out

__all__ = [
    "COSTLY",
    "EAGER",
    "SETTINGS",
    "Setting",
    "Workaround",
    "find_workaround",
    "helps",
    "keep_line_out",
    "keep_out",
    "taken_back",
    "without_line",
]
