"""Plants a fault in every Python process that has this folder on its path: also in the fresh process of a repro.

Python imports a module of this name at its start. The fault is named by an environment variable; without it, nothing
happens.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

_NAME = os.environ.get("PLANTED_IN_INDUCTOR")
if _NAME and "-c" not in sys.orig_argv:  # Inductor asks short-lived processes what the CPU can do; they need no torch
    sys.path.insert(0, str(Path(__file__).parents[4]))
    from tests.support.planted import planted

    sys.path.pop(0)
    kept = planted(_NAME)  # a context that is never left; kept alive here
    kept.__enter__()
