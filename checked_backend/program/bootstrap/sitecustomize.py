"""Starts the checks of ``checked-backend run``, in the program and in every Python that it starts.

Python imports the first ``sitecustomize`` on its path. This one removes itself from the path and runs the next one.
"""

import importlib.machinery
import importlib.util
import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))
_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(_HERE)))

sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != _HERE]
sys.path.append(_ROOT)
try:
    from checked_backend import autostart

    autostart.start()
finally:
    sys.path.pop()

_spec = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path)
if _spec is not None and _spec.loader is not None:
    _shadowed = importlib.util.module_from_spec(_spec)
    sys.modules["sitecustomize"] = _shadowed
    _spec.loader.exec_module(_shadowed)
