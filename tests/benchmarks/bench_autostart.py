"""What the installed hook costs a Python that does not use it: ``python tests/benchmarks/bench_autostart.py [N]``.

Starts a Python with and without the hook's file, in turns, and prints the median and the quartiles of both. The
difference is to be within the spread.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

HOOK = Path(__file__).parents[2] / "checked_backend" / "checked_backend.pth"


def main(times: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        pythons = {}
        for name in ("without", "with"):
            venv.create(Path(folder, name), symlinks=True)
            place = next(Path(folder, name).glob("lib/python*/site-packages"))
            if name == "with":
                (place / HOOK.name).write_bytes(HOOK.read_bytes())
            pythons[name] = Path(folder, name, "bin", "python")
        environment = {name: value for name, value in os.environ.items() if not name.startswith("CHECKED_BACKEND")}
        taken: dict[str, list[float]] = {name: [] for name in pythons}
        for _ in range(times):
            for name, python in pythons.items():
                begun = time.perf_counter()
                subprocess.run([str(python), "-c", "pass"], env=environment, check=True)
                taken[name].append(1e3 * (time.perf_counter() - begun))
        for name, values in taken.items():
            low, middle, high = statistics.quantiles(values, n=4)
            print(f"{name:8} {middle:.2f} ms (quartiles {low:.2f} to {high:.2f})")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 200)
