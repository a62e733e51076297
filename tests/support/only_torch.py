"""Run ``repro.py`` of dumps where nothing but torch, what torch needs, and Python's library can be imported.

    python only_torch.py FOLDER...

Each folder's outputs are saved next to its ``repro.py`` as ``outputs.pt``. Prints one line of JSON for each folder.
"""

from __future__ import annotations

import json
import runpy
import sys
from importlib.metadata import requires
from pathlib import Path
from typing import Any

TORCH = {"torch", "torchgen", "functorch", "markupsafe", "mpmath", "isympy", "distutils", "_distutils_hack"}


class OnlyTorch:
    """Python's own way to find modules, but for everything that is not allowed."""

    def __init__(self, allowed: set[str]) -> None:
        self.allowed = allowed
        self.finders = list(sys.meta_path)
        self.refused: set[str] = set()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        top = name.partition(".")[0]
        if top not in self.allowed and not top.startswith("_sysconfigdata"):
            self.refused.add(top)
            return None
        found = (finder.find_spec(name, path, target) for finder in self.finders)
        return next((spec for spec in found if spec is not None), None)


def main() -> None:
    needed = {line.split(";")[0].split("[")[0].split(">")[0].split("=")[0].strip() for line in requires("torch") or ()}
    allowed = TORCH | {name.replace("-", "_") for name in needed} | set(sys.stdlib_module_names)
    finder = OnlyTorch(allowed)
    sys.meta_path[:] = [finder]
    for folder in map(Path, sys.argv[1:]):
        sys.argv = ["repro.py", "--save", str(folder / "outputs.pt")]
        outcome = "ran"
        try:
            runpy.run_path(str(folder / "repro.py"), run_name="__main__")
        except (Exception, SystemExit) as error:
            outcome = f"{type(error).__name__}: {error}"[:300]
        print(json.dumps({"folder": str(folder), "outcome": outcome}), flush=True)
    foreign = [name for name in sys.modules if name.partition(".")[0] in finder.refused]
    print(json.dumps({"refused": sorted(finder.refused), "foreign": foreign}), flush=True)


if __name__ == "__main__":
    main()
