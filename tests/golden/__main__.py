"""Compare the golden outputs with what the package makes now. Exit code 1: something is different."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from tests.golden.compare import EXPECTED, accept, differences, read, shown
from tests.golden.produce import PARTS, produce


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.golden", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}; default all")
    parser.add_argument("--accept", action="store_true", help="keep what is made now, where it is different")
    parser.add_argument("--folder", type=Path, default=EXPECTED, metavar="DIR", help="where the golden outputs are")
    asked = parser.parse_args(arguments)
    parts, folder = asked.parts or list(PARTS), asked.folder.resolve()
    if unknown := set(parts) - PARTS.keys():
        parser.error(f"no part {', '.join(sorted(unknown))}")
    stored, here = read(folder), Path.cwd()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="golden_") as work:
        os.chdir(work)
        try:
            different = differences(stored, produce(parts, stored), parts)
        finally:
            os.chdir(here)
    for name, (old, new) in different.items():
        print("\n".join(shown(name, old, new)))
    if asked.accept:
        accept(folder, different)
    print(f"{len(different)} files are different" + ", and were written" * (asked.accept and bool(different)))
    return int(bool(different) and not asked.accept)


if __name__ == "__main__":
    for variable in [name for name in os.environ if name.startswith("CHECKED_BACKEND")]:
        del os.environ[variable]  # options of the programs
    sys.exit(main())
